"""Lists, shows and copies the presets of the installed pack."""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments, paths
from llamafactory_preflight.errors import UserError, words


ANY = "any"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One YAML file of the pack.

    Attributes:
        name: The file's name without suffix.
        file: Where it lies.
        tier: The card that it is for, like `24 GB`, or `any`.
        arguments: What it sets.
    """

    name: str
    file: Path
    tier: str
    arguments: dict[str, Any]


def available() -> list[Preset]:
    """All presets, smaller cards first.

    Raises:
        UserError: The pack is not installed beside the package.
    """
    return sorted((_load(file) for file in _folder().glob("*.yaml")), key=lambda preset: (_order(preset), preset.name))


def find(name: str) -> Preset:
    """The preset of this name, with or without `.yaml`.

    Raises:
        UserError: There is none.
    """
    file = _folder() / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name != name or not file.is_file():
        names = ", ".join(preset.name for preset in available())
        raise UserError(f"There is no preset {name!r}", next_step=f"There are {names}")
    return _load(file)


def copy(name: str, target: Path, *, force: bool) -> list[Path]:
    """Writes a preset with its DeepSpeed JSON and its data below `target`; either every file or none is replaced.

    Returns:
        The files, those included that were already there with the same content.

    Raises:
        UserError: Another file stands in the way and `force` is off, or the folder cannot be written.
    """
    preset = find(name)
    pack = _folder().parent
    contents = {target / preset.file.name: preset.file.read_bytes()}
    deepspeed = preset.arguments.get("deepspeed")
    if isinstance(deepspeed, str):
        contents[target / deepspeed] = (pack / deepspeed).read_bytes()
    contents |= _data(preset, target)
    try:
        for file, content in contents.items():
            if file.is_dir():
                raise UserError(f"{file} is a folder", next_step="Nothing was written; choose another place")
            if os.path.lexists(file) and not force and file.read_bytes() != content:
                raise UserError(f"{file} exists already", next_step="Nothing was written; --force overwrites it")
        _write(contents)
    except OSError as error:
        raise UserError(
            f"{error.filename2 or target} cannot be written: {words(error)}", next_step="Nothing was written"
        ) from None
    return list(contents)


def _folder() -> Path:
    pack = paths.pack_folder()
    if pack is None:
        raise UserError("The presets are not installed", next_step="Reinstall llamafactory-preflight")
    return pack / "presets"


def _load(file: Path) -> Preset:
    match = re.match(r"(\d+)gb_", file.name)
    return Preset(
        name=file.stem, file=file, tier=f"{match.group(1)} GB" if match else ANY, arguments=arguments.read(file)
    )


def _order(preset: Preset) -> int:
    return int(preset.tier.split()[0]) if preset.tier != ANY else 0


def _data(preset: Preset, target: Path) -> dict[Path, bytes]:
    """The data sets that a preset names, as files; none where the target has data sets of these names."""
    source = _folder() / str(preset.arguments.get("dataset_dir", "data"))
    names = paths.dataset_names(preset.arguments)
    folder = target / source.name
    if names <= paths.datasets_in(folder).keys():
        return {}
    info = json.loads((source / paths.DATA_INFO).read_text(encoding="utf-8"))
    chosen = {name: info[name] for name in sorted(names)}
    files = {folder / item["file_name"]: (source / item["file_name"]).read_bytes() for item in chosen.values()}
    return files | {folder / paths.DATA_INFO: (json.dumps(chosen, indent=2) + "\n").encode()}


def _write(contents: dict[Path, bytes]) -> None:
    """Writes everything under temporary names first, so that a full disk leaves no half of a preset behind."""
    prepared: list[tuple[str, Path]] = []
    made: list[Path] = []
    try:
        for file, content in contents.items():
            made += [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
            prepared.append((temporary, file))
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.chmod(temporary, 0o644)
        for temporary, file in prepared:
            os.replace(temporary, file)
    finally:
        for temporary, _ in prepared:
            Path(temporary).unlink(missing_ok=True)
        for folder in sorted(made, reverse=True):
            with suppress(OSError):  # only those that stayed empty
                folder.rmdir()
