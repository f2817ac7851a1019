"""Finds what a preset names by a relative path: as written, beside the YAML, or in the installed pack."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


DISTRIBUTION = "llamafactory-preflight"
DATA_INFO = "dataset_info.json"


def resolve(arguments: Mapping[str, Any], *, beside: Path | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replaces `deepspeed` and `dataset_dir` where they do not exist as written.

    A dataset folder that exists but lacks a named dataset is passed over, so that the pack's small data set works in
    any working directory. What is found nowhere stays as written, for LLaMA-Factory to report.

    Args:
        arguments: As `arguments.read` returns them.
        beside: The folder of the YAML file, or None.

    Returns:
        The arguments with absolute paths where something was found elsewhere, and a sentence on each.
    """
    changes: dict[str, tuple[Path, str]] = {}
    deepspeed = arguments.get("deepspeed")
    if isinstance(deepspeed, str) and deepspeed and not deepspeed.startswith("{"):
        changes |= _find("deepspeed", deepspeed, beside, Path.is_file)
    names = dataset_names(arguments)
    folder = arguments.get("dataset_dir", "data")
    if names and isinstance(folder, str) and not folder.startswith("REMOTE:") and folder != "ONLINE":
        changes |= _find("dataset_dir", folder, beside, lambda path: names <= datasets_in(path).keys())
    sentences = tuple(f"`{key}` was found {place}: {found}" for key, (found, place) in changes.items())
    return dict(arguments) | {key: str(found) for key, (found, _) in changes.items()}, sentences


def datasets_in(folder: Path) -> dict[str, Any]:
    """What a dataset folder's `dataset_info.json` says of each data set by its name; empty where there is none."""
    try:
        loaded = json.loads((folder / DATA_INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def pack_folder() -> Path | None:
    """The folder that holds `presets/` and `deepspeed_configs/`: a source tree, or where the wheel put its data."""
    tree = Path(__file__).resolve().parents[3]
    if (tree / "presets").is_dir() and (tree / "pyproject.toml").is_file():
        return tree
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".yaml" and file.parent.name == "presets":
            return Path(str(file.locate())).resolve().parents[1]
    return None


def dataset_names(arguments: Mapping[str, Any]) -> set[str]:
    """Names of the data sets that a run trains or evaluates on."""
    names: set[str] = set()
    for key in ("dataset", "eval_dataset"):
        value = arguments.get(key)
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        names |= {str(item).strip() for item in items}
    return names


def _find(key: str, written: str, beside: Path | None, good: Callable[[Path], bool]) -> dict[str, tuple[Path, str]]:
    path = Path(written)
    if good(path) or path.is_absolute():
        return {}
    pack = pack_folder()
    places = [(folder, "beside the file") for folder in ((beside, beside.parent) if beside else ())]
    # `data` of the pack lies in presets/, so that a preset finds it beside itself.
    places += [(folder, "in the installed pack") for folder in ((pack, pack / "presets") if pack else ())]
    for folder, place in places:
        candidate = (folder / path).resolve()
        if good(candidate):
            return {key: (candidate, place)}
    return {}
