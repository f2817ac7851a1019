"""What the installed torch was built for, read from its source: importing it takes seconds."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """Versions of the runtimes that a torch can use; None for those it was built without."""

    cuda: str | None = None
    hip: str | None = None


def installed() -> TorchBuild | None:
    """Reads `torch/version.py`, or None where there is no torch or its file looks otherwise."""
    try:
        spec = importlib.util.find_spec("torch")  # finds the folder, and runs nothing of a top-level package
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec else None
    return read(Path(next(iter(locations))) / "version.py") if locations else None


def read(file: Path) -> TorchBuild | None:
    """Reads one such file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    values = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *(?:None|['\"]([^'\"]+)['\"])", text, re.MULTILINE))
    if not values:
        return None
    return TorchBuild(cuda=values.get("cuda") or None, hip=values.get("hip") or None)


def has(package: str) -> bool:
    """Whether a top-level package is installed; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
