"""Does it fit: a prediction with honest bounds against what there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llamafactory_preflight.memory import MemoryEstimate


Word = Literal["fits", "tight", "will_not_fit", "unknown"]
UNMEASURED_ERROR = 0.08  # As `memory` allows where it counts weights by their size and looks into no kernel.
HOST_MARGIN = 1.3  # The host figure is rough: only an excess beyond this factor is certain.


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One answer and why.

    Attributes:
        word: `tight` means that the budget lies between the low and the high estimate of the need, or that the card
            holds the run and main memory by far does not.
        reasons: Sentences; without figures, which the report gives.
    """

    word: Word
    reasons: tuple[str, ...]


def needed_bytes(estimate: MemoryEstimate, *, context_bytes: int) -> int:
    """What the card must have free: the largest phase, the allocator's slack, NCCL's buffers and the CUDA context."""
    return max(estimate.phases.values()) + estimate.slack_bytes + estimate.nccl_bytes + context_bytes


def need_bounds(estimate: MemoryEstimate, *, context_bytes: int) -> tuple[int, int]:
    """The need if the peak is at its lower and at its upper bound.

    The allocator's slack belongs to the upper one only: under tight caps runs got through with 16 MiB more than their
    allocated peak, and others failed with 40 (tests/measured/held_out_2).
    """
    largest, peak = max(estimate.phases.values()), estimate.peak_allocated_bytes
    # Where saving or evaluation is the largest phase, it has the same relative uncertainty as the peak.
    low, high = (
        round(largest * bound / peak) if peak else largest for bound in (estimate.low_bytes, estimate.high_bytes)
    )
    outside = context_bytes + estimate.nccl_bytes
    return low + outside, high + estimate.slack_bytes + outside


def judge_gpu(estimate: MemoryEstimate, *, context_bytes: int, budget_bytes: int) -> Verdict:
    """Compares the need of one GPU with what is free on it."""
    low, high = need_bounds(estimate, context_bytes=context_bytes)
    if high <= budget_bytes:
        return Verdict(word="fits", reasons=("Even the high estimate is below what the card has free.",))
    if low > budget_bytes:
        return Verdict(word="will_not_fit", reasons=("Even the low estimate exceeds what the card has free.",))
    return Verdict(
        word="tight", reasons=("It may run out of memory: what is free lies between the low and the high estimate.",)
    )


def judge_host(host_bytes: int, *, budget_bytes: int) -> Verdict:
    """Compares the need of main memory with what is available."""
    if host_bytes <= budget_bytes:
        return Verdict(word="fits", reasons=("The estimate for main memory is below what is available.",))
    if host_bytes > HOST_MARGIN * budget_bytes:
        return Verdict(word="will_not_fit", reasons=("The estimate for main memory far exceeds what is available.",))
    return Verdict(word="tight", reasons=("The rough estimate for main memory is near what is available.",))


def with_host(card: Verdict, host_bytes: int, *, budget_bytes: int | None) -> Verdict:
    """The card's verdict, as far as main memory lets it stand: offloaded states and buffers lie there.

    The figure is rough, so it never says that a run will not fit.
    """
    if card.word != "fits" or budget_bytes is None or host_bytes <= HOST_MARGIN * budget_bytes:
        return card
    return Verdict(word="tight", reasons=("The card holds it, but main memory by far does not.",))


def widened(estimate: MemoryEstimate) -> MemoryEstimate:
    """The estimate for a device that nothing was measured on, with bounds as wide as where kernels are not known."""
    error = round(estimate.peak_allocated_bytes * UNMEASURED_ERROR)
    return replace(
        estimate,
        low_bytes=min(estimate.low_bytes, max(0, estimate.peak_allocated_bytes - error)),
        high_bytes=max(estimate.high_bytes, estimate.peak_allocated_bytes + error),
    )


def unknown(reason: str) -> Verdict:
    """For a run that no formula covers."""
    return Verdict(word="unknown", reasons=(reason,))
