"""`llamafactory-cli preflight A.yaml --tune`: the fastest settings that fit, of a file or of a model and a card."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments, preflight, presets, report
from llamafactory_preflight.advice import yaml_text
from llamafactory_preflight.commands import new_preset
from llamafactory_preflight.data import sample_lengths
from llamafactory_preflight.fitting import fit, tune
from llamafactory_preflight.result import Result


NOTHING_FITS = "Nothing that trains the same fits. --fit --allow ... may find more."
NO_CARD = "--tune looks for the fastest training that fits a GPU; this is none."


def run(file: str, overrides: Sequence[str], *, output: Path | None, as_json: bool, **machine: Any) -> int:
    """Tunes one file and prints its report and what it is expected to gain.

    Args:
        file: A YAML file, or `-`.
        overrides: `key=value` items.
        output: Where to write the file that is faster, or None.
        as_json: Whether to print JSON.
        **machine: The card and the memory, as `preflight.check` takes them.

    Returns:
        0: it fits, as it is or changed. 1: nothing that trains the same fits. 2: it cannot be told.

    Raises:
        UserError: A file, an argument or an amount is faulty.
    """
    result = preflight.check(file, overrides=overrides, **machine)
    if result.verdict.word == "unknown":
        _print(result, as_json)
        return result.exit_code
    found = tune.tuned(result, sample_lengths.estimated(result.run))
    if found is None:
        _print(result, as_json)
        print(NOTHING_FITS if result.device is not None and not result.serves else NO_CARD, file=sys.stderr)
        return 1
    changed = fit.as_arguments(found.set, flags=False)
    faster = preflight.check(file, overrides=[*overrides, *changed], **machine)
    _print(faster, as_json)
    if not changed:
        print("It is as fast as it gets without training something else.", file=sys.stderr)
    elif result.verdict.word == "fits":
        print(f"Changed: {' '.join(changed)}\n  expected to be {found.gain:.1f}x as fast", file=sys.stderr)
    else:
        print(f"Changed: {' '.join(changed)}\n  the fastest of what fits; as given it does not", file=sys.stderr)
    if output is not None:
        yaml_text.write(output, Path(file), found.set, overrides=overrides, command="preflight --tune")
    return faster.exit_code


def create(
    model: str, method: str, overrides: Sequence[str], *, output: Path | None, as_json: bool, **machine: Any
) -> int:
    """Makes a preset for a model and a card: what fits, and of that the fastest.

    Args:
        model: A name on the hub, or a folder.
        method: One of `new_preset.METHODS`.
        overrides: `key=value` items that win over what a preset begins with.
        output: Where to write it; without it the YAML goes to standard output.
        as_json: Whether to print the report as JSON.
        **machine: The card and the memory, as `preflight.check` takes them.

    Returns:
        0: written. 1: nothing fits. 2: the run is not modelled.

    Raises:
        UserError: There is no model or no such method, an override is faulty, or the file cannot be written.
    """
    given = arguments.with_overrides(new_preset.arguments(model, method), overrides)
    result = preflight.check(given, **machine)
    if result.verdict.word == "unknown":
        _print(result, as_json)
        print("No preset was made.", file=sys.stderr)
        return result.exit_code
    found = tune.tuned(result, [])
    chosen: Mapping[str, Any] | None = found.set if found is not None else None
    if chosen is None:
        remedy = fit.fitting(result, allow=frozenset())
        chosen = remedy.set if remedy is not None else None
    if chosen is None:
        _print(result, as_json)
        print(f"{method} of {model} does not fit there at {given['cutoff_len']} tokens.", file=sys.stderr)
        return 1
    final = preflight.check(given | dict(chosen), **machine)
    text = new_preset.text(final, given | dict(chosen))
    if output is None:
        print(text, end="")
        return 0
    presets.put({output: text.encode()}, output, force=True)
    print(f"Written: {output}", file=sys.stderr)
    _print(final, as_json)
    return 0  # whatever this machine lacks, such as disk: the preset is for another


def _print(result: Result, as_json: bool) -> None:
    print(report.as_json(result) if as_json else report.text(result))
