"""What is known of one accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llamafactory_preflight.device.processes import Process
from llamafactory_preflight.units import GIB, MIB


Kind = Literal["cuda", "rocm", "npu", "mps"]

AMPERE = (8, 0)
CONTEXT_BY_TOTAL = ((60 * GIB, 686 * MIB), (28 * GIB, 560 * MIB), (0, 460 * MIB))
"""Bytes by the least total memory of a card: a CUDA context with cuBLAS, beside what torch's allocator holds.

686 MiB was measured on an H200 (driver 580, CUDA 13.0). A context holds local memory for every multiprocessor, so
smaller cards take less; the other two values are estimates, and nothing was measured on them, nor on AMD or Ascend.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, real or planned for.

    Attributes:
        name: As the driver or the user calls it.
        total_bytes: Its memory, or None where it is unknown; of a MIG slice, the slice's.
        free_bytes: What of it a run may take now, or None likewise; for a planned card all of it. What this run's own
            processes hold already counts as free.
        index: Position among the visible devices, as torch counts them.
        compute_capability: Major and minor of an NVIDIA card, or None where unknown.
        processes: Who else computes or draws on it, as far as the driver tells.
        planned: Whether the user named it, so that nothing was measured.
        kind: The kind of device that torch would use it as.
        physical_index: Its number in the driver's own list (`nvidia-smi -i`), or None where unknown.
        uuid: The driver's identifier, or None.
        reserved_bytes: What the driver keeps of it for itself, neither free nor anybody's.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    index: int = 0
    compute_capability: tuple[int, int] | None = None
    processes: tuple[Process, ...] = ()
    planned: bool = False
    kind: Kind = "cuda"
    physical_index: int | None = None
    uuid: str | None = None
    reserved_bytes: int = 0

    @property
    def context_bytes(self) -> int:
        """What one process takes beside its tensors."""
        # Apple's is main memory, and there the process counts as a whole.
        return 0 if self.kind == "mps" else context_of(self.total_bytes or 0)

    @property
    def is_ampere(self) -> bool:
        """Whether it has bf16 and FlashAttention-2, as NVIDIA's cards do since Ampere; unless known, taken so."""
        return self.compute_capability is None or self.compute_capability >= AMPERE

    @property
    def taken_bytes(self) -> int:
        """What others hold of it now."""
        if self.planned or self.total_bytes is None or self.free_bytes is None:
            return 0
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def hidden_bytes(self) -> int:
        """What of `taken_bytes` belongs to nobody that the driver names."""
        return max(0, self.taken_bytes - sum(process.used_bytes or 0 for process in self.processes))


class DriverError(Exception):
    """A driver that is there and does not work; the message is a sentence without a final period."""


def context_of(total_bytes: int) -> int:
    """What a process takes beside its tensors on a card of this size."""
    return next(context for least, context in CONTEXT_BY_TOTAL if total_bytes >= least)


def smallest(devices: Sequence[Device]) -> Device:
    """The device with the least free memory: it decides, as every rank does the same work."""
    assert devices
    return min(devices, key=lambda device: -1 if device.free_bytes is None else device.free_bytes)
