"""An estimate, with honest bounds around its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.memory.card import Card
from llamafactory_preflight.memory.paper.ledger import COMPONENTS


PHASES = ("load", "forward_backward", "optimizer_step", "save", "evaluate")


_RELATIVE_ERROR = 0.012
"""Half the width of the bounds: no measured run of a modelled kind lies outside (tests/measured/README)."""
_RELATIVE_ERROR_BY_SIZE = 0.08
"""The same where weights were counted by their size and kernels not looked into."""
_ABSOLUTE_ERROR = 32 * 2**20
_SLACK = 96 * 2**20
"""Reserved beyond allocated in the tightest capped runs with expandable segments (64 MiB measured)."""
_FRAGMENTS = 0.02
"""Without expandable segments: a run of 15.63 GiB fails under 15.8 and runs under 16.3 (2 % more)."""


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
        host_bytes: Main memory that all processes here cannot do without, at their height: anonymous, shared and
            page-locked pages; mapped files that the system may drop are left out.
        host_training_bytes: The same without the saving of the model at the end.
        host_mapped_bytes: What shows as resident while weights load: the processes, and the files that they map.
        nccl_bytes: What communication takes on the card outside of the allocator.
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
    host_training_bytes: int = 0
    host_mapped_bytes: int = 0
    nccl_bytes: int = 0


def bounds(
    *,
    phases: Mapping[str, int],
    components: Mapping[str, int],
    exact: bool,
    card: Card,
    host: int,
    tokens: int,
    remarks: tuple[str, ...],
    host_training: int = 0,
    host_mapped: int = 0,
    nccl: int = 0,
) -> MemoryEstimate:
    """An estimate whose peak is the sum of its components, with the bounds and the slack that go with it.

    Args:
        phases: Peak of every phase.
        components: Bytes at the peak by component.
        exact: Whether sizes and kernels were measured.
        card: The card.
        host: Bytes of main memory.
        tokens: Tokens of one optimizer step.
        remarks: Sentences for the reader.
        host_training: Bytes of main memory while the run trains, nothing being saved.
        host_mapped: Bytes that show as resident while weights load.
        nccl: Bytes of communication outside of the allocator.
    """
    peak = sum(components.values())
    error = int(peak * (_RELATIVE_ERROR if exact else _RELATIVE_ERROR_BY_SIZE)) + _ABSOLUTE_ERROR if peak else 0
    return MemoryEstimate(
        phases=phases,
        components=dict.fromkeys(COMPONENTS, 0) | dict(components),
        peak_allocated_bytes=peak,
        low_bytes=max(0, peak - error),
        high_bytes=peak + error,
        slack_bytes=_SLACK if card.expandable_segments else _SLACK + int(peak * _FRAGMENTS),
        host_bytes=host,
        tokens_per_step=tokens,
        reasons=remarks,
        host_training_bytes=host_training,
        host_mapped_bytes=host_mapped,
        nccl_bytes=nccl,
    )
