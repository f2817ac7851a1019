"""Puts the parts together: components of every phase, their maximum, and honest bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


PHASES = ("load", "forward_backward", "optimizer_step", "save", "evaluate")
COMPONENTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Predicted bytes on one GPU.

    Attributes:
        phases: Allocated peak of each of `PHASES`, as `torch.cuda.max_memory_allocated` counts it.
        components: Bytes of each of `COMPONENTS` at the peak; they add up to `peak_allocated_bytes`.
        peak_allocated_bytes: The largest of load, forward_backward and optimizer_step.
        low_bytes: The peak will hardly be below this.
        high_bytes: The peak will hardly be above this.
        slack_bytes: What the caching allocator needs beyond the allocated peak under a tight cap.
        host_bytes: Resident memory of the process at its peak.
        tokens_per_step: Tokens of one optimizer step on one GPU, padding included.
        reasons: One sentence for each value that was inferred rather than given.
    """

    phases: Mapping[str, int]
    components: Mapping[str, int]
    peak_allocated_bytes: int
    low_bytes: int
    high_bytes: int
    slack_bytes: int
    host_bytes: int
    tokens_per_step: int
    reasons: tuple[str, ...]


def estimate(run: RunDescription, shape: ModelShape, *, software: Software) -> MemoryEstimate:
    """Predicts one GPU's memory for a run.

    Raises:
        Unmodelled: The run takes a path that no formula here covers.
    """
    raise NotImplementedError
