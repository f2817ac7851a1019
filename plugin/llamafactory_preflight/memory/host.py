"""Main memory of a run on one GPU: what the process cannot do without."""

from __future__ import annotations

from collections.abc import Iterator

from llamafactory_preflight.memory.build import ADAPTERS, checkpointing_kind
from llamafactory_preflight.memory.optimizers import BITSANDBYTES
from llamafactory_preflight.run import RunDescription


PROCESS_BYTES = int(1.3 * 2**30)
"""Resident size of a process with torch, CUDA and transformers, without mapped files (0.8 to 1.3 GiB measured)."""


def host_bytes(run: RunDescription, *, trained: int, num_trained: int, weights: int, inputs: int, peak: int) -> int:
    """Main memory at its height.

    Args:
        run: The run.
        trained: Bytes of what is trained.
        num_trained: Elements of what is trained.
        weights: Bytes of the base model as it lies on the card.
        inputs: Bytes of the inputs of all layers in a micro-batch.
        peak: Peak on the card, which is main memory for a run on the CPU.
    """
    if run.use_cpu:
        return PROCESS_BYTES + peak
    saved = trained if run.finetuning_type in ADAPTERS else weights  # copied from the card to be written
    moved = inputs if checkpointing_kind(run) == "host" else 0
    return PROCESS_BYTES + max(saved, moved) + _paged_states(run, num_trained)


def _paged_states(run: RunDescription, num_trained: int) -> int:
    kind = BITSANDBYTES.get(run.optim or "")
    if kind is None or not kind.paged:
        return 0
    return num_trained * kind.states * kind.bits // 8


def host_remarks(run: RunDescription) -> Iterator[str]:
    """What else will show up as the process's memory."""
    if not run.use_cpu:
        yield "While weights load, their files are mapped: as much shows as resident too, but the system can drop it."
