"""What a training writes to disk, and the free space of the file systems that it goes to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llamafactory_preflight import host, hub, paths
from llamafactory_preflight.hub import ModelSource
from llamafactory_preflight.memory import MemoryEstimate, dtypes, optimizers, statics
from llamafactory_preflight.memory.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


Kind = Literal["weights", "checkpoints", "data"]

ADAPTERS = ("lora", "oft")
CACHE_PER_BYTE = 7
"""Bytes in the cache of data sets for each byte of a data file; rough.

6.65 were measured for 10 MiB of English in JSON: the table of the file, two converted ones, and the tokenized one,
whose labels take 8 bytes a token, its ids 4 and its mask 1.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Bytes of one checkpoint: the model or its adapters, and what is needed to resume."""

    model: int
    states: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Something that a run will write.

    Attributes:
        kind: What it is.
        folder: Where it goes; it need not exist.
        size: Bytes, at least.
    """

    kind: Kind
    folder: Path
    size: int


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
        yield Need(kind="weights", folder=source.cache_dir, size=source.download_bytes)


def checkpoints(run: RunDescription, checkpoint: Checkpoint) -> Iterator[Need]:
    """The final model and the checkpoints that are kept.

    While a checkpoint is written, the one that it replaces is still there.
    """
    if not (run.do_train and run.output_dir):
        return
    kept = 0 if run.save_strategy == "no" else num_saved(run) or 1
    if run.save_total_limit is not None and run.save_total_limit > 0:
        kept = min(kept, run.save_total_limit + 1) if num_saved(run) else run.save_total_limit + 1
    size = checkpoint.model + kept * (checkpoint.model + checkpoint.states)
    yield Need(kind="checkpoints", folder=hub.expanded(run.output_dir), size=size)


def num_saved(run: RunDescription) -> int | None:
    """How many checkpoints a run writes, or None where that depends on the size of the data."""
    if run.save_strategy == "no":
        return 0
    if run.save_strategy == "epoch" and run.max_steps <= 0:
        return math.ceil(run.num_train_epochs)
    if run.save_strategy == "steps" and run.save_steps > 0:
        if run.save_steps < 1:  # a share of all steps
            return math.ceil(1 / run.save_steps)
        if run.max_steps > 0:  # and one at the end
            return math.ceil(run.max_steps / run.save_steps)
    return None


def with_steps(run: RunDescription, *, num_samples: int, num_devices: int) -> RunDescription:
    """The run with the number of its steps, once that of its samples is known (transformers' Trainer)."""
    if run.max_steps > 0 or run.save_strategy != "steps":
        return run
    batches = math.ceil(num_samples / (run.per_device_train_batch_size * num_devices))
    updates = max(1, math.ceil(batches / run.gradient_accumulation_steps))
    return replace(run, max_steps=math.ceil(run.num_train_epochs * updates))


def checkpoint_of(run: RunDescription, shape: ModelShape, *, software: Software) -> Checkpoint:
    """The size of a checkpoint from the model's shape.

    The Trainer saves in the type that parameters have: 4 bytes for what is trained in float32. DeepSpeed writes 16-bit
    weights, and to resume 12 bytes for each trained element, a float32 copy and two moments (runtime/engine.py,
    `_save_zero_checkpoint`); up to stage 2 its own copy of the weights as well, without those that adapters leave
    frozen (transformers passes `exclude_frozen_parameters`).

    Raises:
        Unmodelled: What is trained is not known.
    """
    groups = statics.trainable_groups(run, shape)
    types = precision(run, shape)
    trained = statics.total(groups)
    every = statics.total(statics.model_groups(shape)) + (shape.vision.numel if shape.vision is not None else 0)
    adapts = run.finetuning_type in ADAPTERS
    frozen = 0 if adapts else every - trained
    if run.deepspeed is not None:
        saved = (trained + frozen) * dtypes.size(BFLOAT16)
        stage = (run.deepspeed.get("zero_optimization") or {}).get("stage", 0)
        states = 3 * trained * dtypes.size(FLOAT32) + (saved if stage != 3 else 0)
    else:
        saved = trained * dtypes.size(types.trained) + frozen * dtypes.size(types.loaded)
        states = (
            _states(run, trained)
            or optimizers.optimizer_memory(run, groups, types.trained, software=software, block=int).states
        )
    return Checkpoint(model=saved, states=0 if run.save_only_model else states)


def checkpoint_from(run: RunDescription, estimate: MemoryEstimate) -> Checkpoint:
    """The size of a checkpoint of a model whose shape is not known, from what lies on the card."""
    parts = estimate.components
    model = parts["adapters"] if run.finetuning_type in ADAPTERS else parts["weights"]
    return Checkpoint(model=model, states=0 if run.save_only_model else parts["optimizer"])


def data(run: RunDescription, environ: Mapping[str, str]) -> Iterator[Need]:
    """The cache of local data files, roughly; data of a hub and streamed data are left out."""
    if run.streaming or run.tokenized_path is not None:
        return
    size = sum(_file_bytes(run))
    if size:
        home = environ.get("HF_DATASETS_CACHE") or str(hub.huggingface_home(environ) / "datasets")
        yield Need(kind="data", folder=hub.expanded(run.cache_dir or home), size=CACHE_PER_BYTE * size)


def _states(run: RunDescription, trained: int) -> int | None:
    """Bytes of a paged optimizer's states, which lie in main memory; None for others."""
    kind = optimizers.BITSANDBYTES.get(run.optim or "")
    return trained * kind.states * kind.bits // 8 if kind is not None and kind.paged else None


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
