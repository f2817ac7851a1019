"""What is known of a run while it runs: plain data that the callback fills and the others read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


PHASES = ("data", "load", "forward_backward", "optimizer_step", "evaluate", "save")
WORDS = {
    "data": "while the data was read and tokenized",
    "load": "while the model was loaded",
    "forward_backward": "in the forward or backward pass",
    "optimizer_step": "in the optimizer step",
    "evaluate": "in the evaluation",
    "save": "while saving",
}


@dataclass(kw_only=True, slots=True)
class Peak:
    """The most that one phase has taken, in bytes.

    Attributes:
        allocated: Bytes in tensors; on the CPU the process's resident memory.
        reserved: Bytes that the caching allocator holds.
    """

    allocated: int = 0
    reserved: int = 0

    def include(self, allocated: int, reserved: int) -> None:
        """Raises both to what was seen."""
        self.allocated = max(self.allocated, allocated)
        self.reserved = max(self.reserved, reserved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch: its shape, padding included, and the step that it belonged to."""

    sequences: int
    tokens: int
    step: int

    @property
    def size(self) -> int:
        """All its tokens."""
        return self.sequences * self.tokens


@dataclass(kw_only=True, slots=True)
class State:
    """One process of a run.

    Attributes:
        rank: Its number among all processes.
        on_gpu: Whether `peaks` are those of a GPU.
        phase: What it is doing, one of `PHASES`.
        step: Optimizer steps begun.
        peaks: By phase.
        held_bytes: Allocated when nothing is under way: after `load`, and between `steps`.
        least_free_bytes: The least that was free on the card at a logged step, or None.
        host_peak_bytes: The most of main memory that was resident.
        longest: The largest micro-batch of the training so far.
        current: The micro-batch under way.
        expected_bytes: Predicted upper bound of the peak, or None.
        exceeded_at_step: First step whose peak was above it.
        watch_seconds: Time spent on watching inside the training loop.
    """

    rank: int = 0
    on_gpu: bool = False
    phase: str = "data"
    step: int = 0
    peaks: dict[str, Peak] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    least_free_bytes: int | None = None
    host_peak_bytes: int = 0
    longest: Batch | None = None
    current: Batch | None = None
    expected_bytes: int | None = None
    exceeded_at_step: int | None = None
    watch_seconds: float = 0.0

    def peak(self) -> Peak:
        """The peak as the prediction counts it: over load and training steps."""
        total = Peak()
        for phase in ("load", "forward_backward", "optimizer_step"):
            seen = self.peaks.get(phase, Peak())
            total.include(seen.allocated, seen.reserved)
        return total

    def note(self, allocated: int, reserved: int) -> None:
        """Counts a reading to the phase that is under way."""
        self.peaks.setdefault(self.phase, Peak()).include(allocated, reserved)
        over = self.expected_bytes is not None and allocated > self.expected_bytes
        if over and self.exceeded_at_step is None and self.phase in ("forward_backward", "optimizer_step"):
            self.exceeded_at_step = self.step

    def saw(self, batch: Batch) -> None:
        """Counts a micro-batch whose forward pass begins."""
        self.current = batch
        if self.phase == "forward_backward" and (self.longest is None or batch.size > self.longest.size):
            self.longest = batch

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in bytes."""
        peak = self.peak()
        return {
            "rank": self.rank,
            "on_gpu": self.on_gpu,
            "steps": self.step,
            "peak_allocated_bytes": peak.allocated if self.on_gpu else None,
            "peak_reserved_bytes": peak.reserved if self.on_gpu else None,
            "host_peak_bytes": self.host_peak_bytes,
            "least_free_bytes": self.least_free_bytes,
            "phases": {
                phase: {"allocated_bytes": seen.allocated, "reserved_bytes": seen.reserved}
                for phase, seen in self.peaks.items()
            },
            "held_bytes": dict(self.held_bytes),
            "longest_batch": asdict(self.longest) if self.longest else None,
            "exceeded_at_step": self.exceeded_at_step,
            "watch_seconds": round(self.watch_seconds, 6),
        }


def of_rank(environ: Mapping[str, str]) -> State:
    """The state of the process with this environment."""
    rank = environ.get("RANK", "0")
    return State(rank=int(rank) if rank.isdigit() else 0)
