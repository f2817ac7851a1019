"""`llamafactory-cli preflight A.yaml --fit`: the report of a run that was made to fit, and its file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamafactory_preflight import preflight, report
from llamafactory_preflight.advice import yaml_text
from llamafactory_preflight.fitting import fit, judgement
from llamafactory_preflight.result import Result
from llamafactory_preflight.settings import allowed


def run(file: str, overrides: Sequence[str], *, allow: str, output: Path | None, as_json: bool, **machine: Any) -> int:
    """Fits one file and prints its report.

    Args:
        file: A YAML file, or `-`.
        overrides: `key=value` items.
        allow: Names of what else may be changed, separated by commas.
        output: Where to write the file that fits, or None.
        as_json: Whether to print JSON.
        **machine: The card and the memory, as `preflight.check` takes them.

    Returns:
        0: it fits, as it is or changed. 1: nothing allowed makes it fit. 2: it cannot be told.

    Raises:
        UserError: A file, an argument or an amount is faulty.
    """
    permitted = allowed(allow)
    result = preflight.check(file, overrides=overrides, **machine)
    if result.verdict.word in ("fits", "unknown"):
        _print(result, as_json)
        if result.verdict.word == "fits" and output is not None:
            _write(output, file, overrides, {})
        return result.exit_code
    remedy = fit.fitting(result, allow=permitted)
    if remedy is None:
        _print(result, as_json)
        print(_reason(result, permitted), file=sys.stderr)
        return 1
    changed = fit.as_arguments(remedy.set, flags=False)
    fitted = preflight.check(file, overrides=[*overrides, *changed], **machine)
    _print(fitted, as_json)
    print(f"Changed: {remedy.line}\n  costs {remedy.costs}", file=sys.stderr)
    if fitted.lacks_host:
        print(_host(fitted), file=sys.stderr)
    if output is not None:
        _write(output, file, overrides, remedy.set)
    return fitted.exit_code


def _reason(result: Result, permitted: frozenset[str]) -> str:
    """Why nothing was changed."""
    if result.serves:
        return "--fit changes trainings only, and these are the arguments of a chat, an API or an export."
    if result.device is None:
        return "--fit fits a run to a GPU; this one is on the CPU, where main memory holds everything."
    if result.estimate is not None and judgement.fits(result, result.estimate):
        return f"The card holds it, so --fit changes nothing. {_host(result)}"
    left = ",".join(name for name in fit.KEPT if name not in permitted)
    return "Nothing that may be changed makes it fit." + (f" Not allowed so far: --allow {left}" if left else "")


def _host(result: Result) -> str:
    assert result.estimate is not None
    needed, budget = report.size(result.estimate.host_bytes), report.size(result.host_budget_bytes)
    return f"Main memory: about {needed} needed, {budget} available, and nothing that --fit changes frees any."


def _print(result: Result, as_json: bool) -> None:
    print(report.as_json(result) if as_json else report.text(result))


def _write(output: Path, file: str, overrides: Sequence[str], changes: Mapping[str, Any]) -> None:
    yaml_text.write(output, Path(file), changes, overrides=overrides, command="preflight --fit")
