from __future__ import annotations

import dataclasses

import pytest

from llamafactory_preflight import verdict
from llamafactory_preflight.memory import MemoryEstimate


ESTIMATE = MemoryEstimate(
    phases={"load": 40, "forward_backward": 100, "optimizer_step": 90, "save": 50, "evaluate": 60},
    components={"weights": 40, "adapters": 5, "gradients": 5, "optimizer": 10, "activations": 20, "logits": 20,
                "buffers": 0},
    peak_allocated_bytes=100,
    low_bytes=90,
    high_bytes=110,
    slack_bytes=7,
    host_bytes=1000,
    tokens_per_step=1,
    reasons=(),
)  # fmt: skip


def test_the_need_is_the_largest_phase_with_slack_and_context() -> None:
    assert verdict.needed_bytes(ESTIMATE, context_bytes=3) == 110
    evaluated = dataclasses.replace(ESTIMATE, phases={**ESTIMATE.phases, "evaluate": 200})
    assert verdict.needed_bytes(evaluated, context_bytes=3) == 210
    assert verdict.need_bounds(evaluated, context_bytes=3) == (183, 230)
    together = dataclasses.replace(ESTIMATE, nccl_bytes=5)
    assert verdict.needed_bytes(together, context_bytes=3) == 115
    assert verdict.need_bounds(together, context_bytes=3) == (98, 125)


@pytest.mark.parametrize(
    ("budget", "word"),
    [(121, "fits"), (120, "fits"), (119, "tight"), (93, "tight"), (92, "will_not_fit"), (1, "will_not_fit")],
)
def test_the_gpu_verdict_at_its_edges(budget: int, word: str) -> None:
    answer = verdict.judge_gpu(ESTIMATE, context_bytes=3, budget_bytes=budget)
    assert answer.word == word
    assert answer.reasons


@pytest.mark.parametrize(("budget", "word"), [(1000, "fits"), (999, "tight"), (770, "tight"), (769, "will_not_fit")])
def test_the_host_verdict_at_its_edges(budget: int, word: str) -> None:
    assert verdict.judge_host(1000, budget_bytes=budget).word == word


def test_a_device_that_nothing_was_measured_on_has_wide_bounds() -> None:
    sure = dataclasses.replace(ESTIMATE, low_bytes=99, high_bytes=101)
    wide = verdict.widened(sure)
    assert (wide.low_bytes, wide.high_bytes) == (92, 108)
    assert verdict.widened(wide) == wide
    assert verdict.widened(ESTIMATE) == ESTIMATE, "never narrower"


def test_main_memory_that_is_far_too_small_takes_the_certainty_but_never_stops_a_run() -> None:
    fits = verdict.judge_gpu(ESTIMATE, context_bytes=3, budget_bytes=200)
    assert verdict.with_host(fits, 1000, budget_bytes=700).word == "tight"
    assert verdict.with_host(fits, 1000, budget_bytes=800) is fits
    assert verdict.with_host(fits, 1000, budget_bytes=None) is fits
    lost = verdict.judge_gpu(ESTIMATE, context_bytes=3, budget_bytes=1)
    assert verdict.with_host(lost, 1000, budget_bytes=1) is lost
