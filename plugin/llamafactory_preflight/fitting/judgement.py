"""Judges a run, and changed versions of it, against the card and the main memory that a preflight found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from llamafactory_preflight import memory, verdict
from llamafactory_preflight.advice import remedies
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.machine import survey
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import RunDescription


def proposed(
    result: Result,
    *,
    length: int | None = None,
    eval_length: int | None = None,
    kept: frozenset[str] = frozenset(),
    env: Mapping[str, str] | None = None,
) -> tuple[remedies.Remedy, ...]:
    """Changes with which a run fits the deciding card for certain; none where it does as it is.

    Args:
        result: The run.
        length: Tokens of the longest sample, where it is known.
        eval_length: The same for what is evaluated.
        kept: Arguments that must stay.
        env: The environment, if it is not this process's.
    """
    if result.device is None or result.shape is None or result.estimate is None or fits(result, result.estimate):
        return ()
    return remedies.remedies(
        result.run,
        result.shape.model_type,
        software=result.software,
        predict=predictor(result, length=length, eval_length=eval_length, env=env),
        fits=lambda estimate: fits(result, estimate),
        shards=survey.deepspeed_files(result.software, len(result.devices), env=os.environ if env is None else env),
        kept=kept,
        has_bf16=result.device.is_ampere,
    )


def predictor(
    result: Result, *, length: int | None = None, eval_length: int | None = None, env: Mapping[str, str] | None = None
) -> remedies.Predict:
    """Predicts changed versions of a run, with images; what main memory does not hold is unmodelled, if it is new."""
    shape, source = result.shape, result.images
    assert shape is not None and result.estimate is not None
    budget = result.host_budget_bytes if result.device is not None else None
    most = None if budget is None else max(budget, result.estimate.host_bytes)
    environ, num_gpus = os.environ if env is None else env, len(result.devices)
    ranks = survey.ranks_of(num_gpus, env=environ) if result.device is not None else memory.Ranks()
    card = survey.card_of(result.device, num_gpus=num_gpus, env=environ)
    known = partial(memory.estimate, shape=shape, software=result.software, card=card)

    def predict(changed: RunDescription) -> memory.MemoryEstimate:
        images = source.of(changed, length) if source is not None else None
        estimate = known(changed, length=length, eval_length=eval_length, ranks=ranks, images=images)
        if most is not None and estimate.host_bytes > most:
            raise Unmodelled("Main memory does not hold what it would move there")
        return estimate

    return predict


def fits(result: Result, estimate: memory.MemoryEstimate) -> bool:
    """Whether the deciding card holds a changed version of a run for certain."""
    return judge(estimate, result.device, None).word == "fits"


def judge(estimate: memory.MemoryEstimate, decisive: Device | None, host_budget_bytes: int | None) -> verdict.Verdict:
    """Compares the estimate with the deciding card, or for a run on the CPU with main memory."""
    if decisive is None:
        if host_budget_bytes is None:
            return verdict.unknown("This system does not tell how much main memory is available.")
        return verdict.judge_host(estimate.host_bytes, budget_bytes=host_budget_bytes)
    if decisive.free_bytes is None:
        return verdict.unknown(phrase("The memory of {name} is not known; name it with --gpu.", name=decisive.name))
    if decisive.kind != "cuda":
        estimate = verdict.widened(estimate)
    return verdict.judge_gpu(estimate, context_bytes=decisive.context_bytes, budget_bytes=decisive.free_bytes)


def judge_with_host(
    estimate: memory.MemoryEstimate, decisive: Device | None, host_budget_bytes: int | None
) -> verdict.Verdict:
    """As `judge`; a card's verdict stands only as far as main memory lets it."""
    answer, budget = judge(estimate, decisive, host_budget_bytes), host_budget_bytes if decisive is not None else None
    return verdict.with_host(answer, estimate.host_bytes, budget_bytes=budget)
