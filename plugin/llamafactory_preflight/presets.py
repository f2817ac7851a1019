"""Lists, shows and copies the presets of the installed pack."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.errors import UserError, words
from llamafactory_preflight.units import GIB


ANY = "any"
RECORD = "measured.json"
_DATA = "data"  # `dataset_dir` of every preset
# What the allocator may use on the smallest common card of a tier, in GiB: its total memory as torch reports it
# without the CUDA context. 12: RTX 3060, 16: T4, 24: A10 and L4, 32: V100, 40 and 80: A100, 48: L40S with ECC.
USABLE_GIB = {12: 11.0, 16: 14.0, 24: 21.5, 32: 31.0, 40: 38.6, 48: 43.8, 80: 78.3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a preset took in a real run on another card, under the memory of its own.

    Attributes:
        peak_bytes: `torch.cuda.max_memory_allocated` on the fullest GPU.
        tokens_per_second: Of all GPUs together, or None where only memory was measured.
        gpu: The card that it ran on.
    """

    peak_bytes: int
    tokens_per_second: int | None
    gpu: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One YAML file of the pack.

    Attributes:
        name: The file's name without suffix.
        file: Where it lies.
        tier: The card that it is for, like `24 GB` or `2 x 24 GB`, or `any`.
        tier_gb: The same as a number, or 0.
        num_gpus: How many cards take part.
        method: `lora`, `qlora` or `full`.
        arguments: What it sets.
        measured: What it took, or None where nothing is recorded.
    """

    name: str
    file: Path
    tier: str
    tier_gb: int
    num_gpus: int
    method: str
    arguments: dict[str, Any]
    measured: Measured | None = None

    @property
    def usable_bytes(self) -> int:
        """What the allocator may use on the smallest common card of the tier; 0 for a preset of no tier."""
        return int(USABLE_GIB.get(self.tier_gb, 0) * GIB)


def available() -> list[Preset]:
    """All presets, smaller cards first.

    Raises:
        UserError: The pack is not installed beside the package.
    """
    found = (_load(file) for file in _folder().glob("*.yaml"))
    return sorted(found, key=lambda preset: (preset.num_gpus, preset.tier_gb, preset.name))


def find(name: str) -> Preset:
    """The preset of this name, with or without `.yaml`.

    Raises:
        UserError: There is none.
    """
    file = _folder() / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name != name or not file.is_file():
        names = [preset.name for preset in available()]
        wanted = Path(name.lower()).stem.replace("-", "_")
        alike = [each for each in names if each.startswith(wanted)] if wanted else []
        alike = alike or difflib.get_close_matches(wanted, names, n=3, cutoff=0.75)
        raise UserError(f"There is no preset {name!r}", next_step=f"There are {', '.join(alike or names)}")
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
    contents = {target / preset.file.name: _as_copied(preset)}
    deepspeed = preset.arguments.get("deepspeed")
    if isinstance(deepspeed, str):
        contents[target / deepspeed] = (pack / deepspeed).read_bytes()
    return put(contents | _data(preset, target), target, force=force)


def _as_copied(preset: Preset) -> bytes:
    """A preset whose header has the command for the folder that it lies in, and not for this repository."""
    name = preset.file.name
    return preset.file.read_bytes().replace(b" train presets/" + name.encode(), b" train " + name.encode())


def missing_data(name: str, target: Path) -> str:
    """What to say where `target` keeps a list of data sets that lacks those of a preset; empty where it has them."""
    info = target / _DATA / paths.DATA_INFO
    missing = sorted(paths.dataset_names(find(name).arguments) - paths.datasets_in(info.parent).keys())
    if not missing:
        return ""
    return f"{info} was left as it is. It has no {', '.join(missing)}: set `dataset` to one of yours."


def with_absolute_paths(preset: Preset) -> dict[str, Any]:
    """A preset's arguments for another working folder: its DeepSpeed file lies in the pack."""
    deepspeed = preset.arguments.get("deepspeed")
    if not isinstance(deepspeed, str):
        return preset.arguments
    return preset.arguments | {"deepspeed": str((preset.file.parent.parent / deepspeed).resolve())}


def put(contents: Mapping[Path, bytes], target: Path, *, force: bool) -> list[Path]:
    """Writes files below `target`, all or none.

    Returns:
        The files, those included that were already there with the same content.

    Raises:
        UserError: Another file stands in the way and `force` is off, or the folder cannot be written.
    """
    try:
        for file, content in contents.items():
            _refuse_what_stands_there(file)
            if os.path.lexists(file) and not force and not (file.exists() and file.read_bytes() == content):
                raise UserError(f"{file} exists already", next_step="Nothing was written; --force overwrites it")
        _write(contents)
    except OSError as error:
        place = error.filename2 or error.filename or target
        raise UserError(f"{place} cannot be used: {words(error)}", next_step="Nothing was written") from None
    return list(contents)


def _refuse_what_stands_there(file: Path) -> None:
    """Not even `--force` replaces a folder or a device, or makes a folder of a file.

    Raises:
        UserError: One of them stands there.
    """
    elsewhere = "Nothing was written; choose another place"
    if file.is_dir():
        raise UserError(f"{file} is a folder", next_step=elsewhere)
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is a device, not a file", next_step=elsewhere)
    for folder in file.parents:
        if os.path.lexists(folder) and not folder.is_dir():
            raise UserError(f"{folder} is not a folder", next_step=elsewhere)


def _folder() -> Path:
    pack = paths.pack_folder()
    if pack is None:
        raise UserError("The presets are not installed", next_step="Reinstall llamafactory-preflight")
    return pack / "presets"


def _load(file: Path) -> Preset:
    given = arguments.read(file)
    match = re.match(r"(?:(\d+)x)?(\d+)gb_", file.name)
    num_gpus, tier_gb = (int(match[1] or 1), int(match[2])) if match else (1, 0)
    return Preset(
        name=file.stem,
        file=file,
        tier=f"{f'{num_gpus} x ' if num_gpus > 1 else ''}{tier_gb} GB" if match else ANY,
        tier_gb=tier_gb,
        num_gpus=num_gpus,
        method=("q" if given.get("quantization_bit") else "") + str(given.get("finetuning_type", "lora")),
        arguments=given,
        measured=_measured(file),
    )


def _measured(file: Path) -> Measured | None:
    record = file.with_name(RECORD)
    row = json.loads(record.read_text(encoding="utf-8")).get(file.stem) if record.is_file() else None
    if row is None:
        return None
    return Measured(
        peak_bytes=int(row["peak_gib"] * GIB), tokens_per_second=row["tokens_per_second"], gpu=str(row["gpu"])
    )


def _data(preset: Preset, target: Path) -> dict[Path, bytes]:
    """All data sets of the pack as files, so that the next preset finds its own.

    Where the target has a list, not even `--force` replaces what is there; one of ours is completed.
    """
    source = _folder() / _DATA
    info = target / _DATA / paths.DATA_INFO
    text = (source / paths.DATA_INFO).read_bytes()
    files = {
        info.with_name(item["file_name"]): (source / item["file_name"]).read_bytes()
        for item in json.loads(text).values()
    }
    if not os.path.lexists(info):
        return files | {info: text}
    is_ours = info.is_file() and info.read_bytes() == text
    return {file: content for file, content in files.items() if is_ours and not os.path.lexists(file)}


def _write(contents: Mapping[Path, bytes]) -> None:
    """Writes everything under temporary names first, so that a full disk leaves no half of a preset behind."""
    prepared: list[tuple[str, Path]] = []
    made: list[Path] = []
    try:
        for file, content in contents.items():
            made += [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
            except OSError as error:
                error.filename = str(file)  # whoever reads it has not heard of the temporary one
                raise
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
