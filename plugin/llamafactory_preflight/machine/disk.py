"""What a training writes to disk, and the free space of the file systems that it goes to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamafactory_preflight.arguments import paths
from llamafactory_preflight.machine import host
from llamafactory_preflight.machine.checkpoint_size import Checkpoint, num_saved
from llamafactory_preflight.memory.sharding import Ranks
from llamafactory_preflight.memory.zero.swapped import swapped_files
from llamafactory_preflight.model import hub
from llamafactory_preflight.model.hub import ModelSource
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


Kind = Literal["weights", "checkpoints", "data", "offloaded"]

CACHE_PER_BYTE = 7
"""Bytes in the cache of data sets for each byte of a data file; rough.

6.65 were measured for 10 MiB of English in JSON: the table of the file, two converted ones, and the tokenized one,
whose labels take 8 bytes a token, its ids 4 and its mask 1.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Something that a run will write.

    Attributes:
        kind: What it is.
        folder: Where it goes; it need not exist.
        size: Bytes as far as known.
        certain: Bytes that it takes in any case.
    """

    kind: Kind
    folder: Path
    size: int
    certain: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A file system on which there is not enough room.

    Attributes:
        needs: What goes to it, the largest first.
        free: Bytes that are free on it.
    """

    needs: tuple[Need, ...]
    free: int

    @property
    def wanted(self) -> int:
        """Bytes of all of it together."""
        return sum(need.size for need in self.needs)


def shortages(needs: Sequence[Need]) -> Iterator[Shortage]:
    """Adds up what goes to the same file system and yields those that are too small."""
    by_system: dict[object, list[Need]] = {}
    for need in needs:
        by_system.setdefault(host.file_system(need.folder), []).append(need)
    for together in by_system.values():
        free = host.free_disk_bytes(together[0].folder)
        shortage = Shortage(needs=tuple(sorted(together, key=lambda need: -need.size)), free=free or 0)
        if free is not None and shortage.wanted > free:
            yield shortage


def weights(source: ModelSource) -> Iterator[Need]:
    """The weights that are still to be downloaded, where their size is known."""
    if source.download_bytes:
        yield Need(kind="weights", folder=source.cache_dir, size=source.download_bytes, certain=source.download_bytes)


def checkpoints(run: RunDescription, checkpoint: Checkpoint) -> Iterator[Need]:
    """The final model and the checkpoints that are kept.

    While a checkpoint is written, the one that it replaces is still there.
    """
    if not (run.do_train and run.output_dir):
        return
    written = num_saved(run)
    at_most = run.save_total_limit + 1 if run.save_total_limit is not None and run.save_total_limit > 0 else None
    if written is None:  # one for certain, at the end
        certain, kept = 1, at_most or 1
    else:
        certain = kept = min(written, at_most or written)
    each = checkpoint.model + checkpoint.states
    yield Need(
        kind="checkpoints",
        folder=hub.expanded(run.output_dir),
        size=checkpoint.model + kept * each,
        certain=checkpoint.model + certain * each,
    )


def offloaded(run: RunDescription, shape: ModelShape, ranks: Ranks) -> Iterator[Need]:
    """What DeepSpeed writes to an NVMe, of all ranks here."""
    zero = (run.deepspeed or {}).get("zero_optimization", {})
    files = {key: size * ranks.local for key, size in swapped_files(run, shape, world=ranks.world).items()}
    for key, size in files.items():
        section = zero.get(key)
        folder = section.get("nvme_path") if isinstance(section, Mapping) else None
        if size and isinstance(folder, str):
            yield Need(kind="offloaded", folder=hub.expanded(folder), size=size, certain=size)


def data(run: RunDescription, environ: Mapping[str, str]) -> Iterator[Need]:
    """The cache of local data files, roughly; data of a hub and streamed data are left out."""
    if run.streaming or run.tokenized_path is not None:
        return
    size = sum(_file_bytes(run))
    if size:
        home = environ.get("HF_DATASETS_CACHE") or str(hub.huggingface_home(environ) / "datasets")
        yield Need(kind="data", folder=hub.expanded(run.cache_dir or home), size=CACHE_PER_BYTE * size, certain=0)


def _file_bytes(run: RunDescription) -> Iterator[int]:
    folder = Path(run.dataset_dir)
    try:
        described = json.loads((folder / paths.DATA_INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(described, dict):
        return
    for name in {*run.dataset, *run.eval_dataset}:
        entry = described.get(name)
        file = entry.get("file_name") if isinstance(entry, dict) else None
        if isinstance(file, str):
            yield from _sizes(folder / file)


def _sizes(path: Path) -> Iterator[int]:
    try:
        if path.is_dir():
            yield from (entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        else:
            yield path.stat().st_size
    except OSError:
        return
