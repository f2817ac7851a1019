"""`llamafactory-cli template A.yaml`: what is wrong with the input is told before torch is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.findings import names
from llamafactory_preflight.model import hub
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.settings import Settings, is_enabled
from llamafactory_preflight.software import Software
from llamafactory_preflight.templates import view


LAUNCHED = ("deepspeed", "fsdp", "fsdp_config")
"""Arguments that decide nothing about samples, and may name files of another machine."""


def run(file: str, overrides: Sequence[str], *, num_samples: int, html: Path | None, as_json: bool) -> int:
    """Prints samples of a run as the model will see them.

    Args:
        file: A YAML or JSON file, or `-`.
        overrides: `key=value` items.
        num_samples: How many to print.
        html: A page to write them to as well, or None.
        as_json: Whether to print JSON.

    Returns:
        0: they were printed.

    Raises:
        UserError: A file, an argument or a switch is faulty, or the model or the data is not to be had.
    """
    Settings.from_environment()
    if html is not None and not html.parent.is_dir():
        raise UserError(f"The folder of {html} does not exist", where="--html", next_step="Make it first")
    if importlib.util.find_spec("llamafactory") is None:
        raise UserError("LLaMA-Factory is not installed in this environment", next_step="pip install llamafactory")
    given = arguments.read("-" if file == "-" else Path(file), overrides)
    given = {key: value for key, value in given.items() if key not in LAUNCHED}
    given, _ = paths.resolve(given, beside=Path(file).resolve().parent)
    _check(given, file, overrides)
    with redirect_stdout(sys.stderr):  # LLaMA-Factory logs to standard output, which is for the samples
        from llamafactory_preflight.fixer.show import show

        shown = show(given, num_samples=max(0, num_samples))
    if as_json:
        print(json.dumps(asdict(shown)))
        return 0
    for number, sample in enumerate(shown.samples):
        print(f"{view.heading(number, sample)}\n{view.terminal(sample, coloured=sys.stdout.isatty())}\n")
    numbers = view.statistics(shown.lengths, shown.trained, cutoff_len=shown.cutoff_len)
    print("\n".join([view.LEGEND, *numbers, *(f"finding: {finding}" for finding in shown.findings)]))
    if html:
        html.write_text(view.page(file, shown.samples, numbers, shown.findings), encoding="utf-8")
    return 0


def _check(given: Mapping[str, Any], file: str, overrides: Sequence[str]) -> None:
    """Raises for what can be told without LLaMA-Factory.

    Raises:
        UserError: It is faulty, or not to be had here.
    """
    described = from_arguments(
        given,
        software=Software.installed(),
        origin="standard input" if file == "-" else file,
        overridden=arguments.overridden(overrides),
        allow_extra=is_enabled(os.environ, "ALLOW_EXTRA_ARGS"),
    )
    for finding in (*names.template(described), *names.data_sets(described, trains=True)):
        if finding.severity == "error":
            raise UserError(finding.message.rstrip("."))
    _reach_model(described)


def _reach_model(described: RunDescription) -> None:
    """Sees to it that nothing waits for a hub which does not answer: its clients try for minutes.

    Raises:
        UserError: The model is neither here nor on a hub that answers.
    """
    name = str(described.model_name_or_path)
    named: dict[str, Any] = {"revision": described.model_revision, "cache_dir": described.cache_dir}
    try:
        is_here = bool(hub.find(name, asks=False, **named))
    except Unmodelled:
        is_here = False
    if (os.path.isdir(name) and not names.are_remote(described)) or hub.answers(name, os.environ):
        return
    if not is_here:
        raise UserError(
            f"{name} is not in the local cache, and the hub does not answer",
            where="`model_name_or_path`",
            next_step="Give the folder of the model, or name a mirror in HF_ENDPOINT",
        )
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which it is not yet
