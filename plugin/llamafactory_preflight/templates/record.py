"""The side file beside a model or an adapter: in which mode it was trained, and with which chat template."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamafactory_preflight import whole_file
from llamafactory_preflight.templates.families import Mode


FILE_NAME = "llamafactory_preflight_template.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a training did.

    Attributes:
        mode: Mode of most of the trained answers, and so the default of the saved chat template.
        num_think: Trained answers with reasoning.
        num_no_think: Trained answers without.
        family: Which official chat template it was.
        template: LLaMA-Factory's name of the template.
        rules: Hash of the code that rendered what was trained.
    """

    mode: Mode
    num_think: int
    num_no_think: int
    family: str
    template: str
    rules: str


def read(folder: str | Path | None) -> Record | None:
    """The record in a folder, or None where there is none that can be read."""
    try:
        given: dict[str, Any] = json.loads((Path(folder or "") / FILE_NAME).read_text(encoding="utf-8"))
        record = Record(**{name: given[name] for name in Record.__slots__})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.mode in ("think", "no_think") else None


def write(folder: str | Path, record: Record) -> None:
    """Puts the record beside the model's files."""
    text = json.dumps({"schema": 1, **asdict(record)}, ensure_ascii=False, indent=2)
    whole_file.write(Path(folder) / FILE_NAME, text + "\n")


def majority(num_think: int, num_no_think: int, *, otherwise: Mode) -> Mode:
    """The mode of most answers; `otherwise` for a draw."""
    if num_think == num_no_think:
        return otherwise
    return "think" if num_think > num_no_think else "no_think"
