"""Predicts a run: alone on a GPU, or as one of several ranks that share what they train."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory.card import Card, cublas_workspace
from llamafactory_preflight.memory.estimators.base import Estimator, evaluates
from llamafactory_preflight.memory.estimators.fsdp import FsdpEstimator
from llamafactory_preflight.memory.estimators.sharded import ShardedEstimator
from llamafactory_preflight.memory.estimators.zero3_quantized import QuantizedShards
from llamafactory_preflight.memory.estimators.zero3_swapped import SwappedShards
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.memory.refusals import refuse
from llamafactory_preflight.memory.result import PHASES, MemoryEstimate
from llamafactory_preflight.memory.sharding import Ranks
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


__all__ = ["PHASES", "Card", "MemoryEstimate", "Ranks", "cublas_workspace", "estimate", "evaluates"]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Spares looking for cycles: there are none, as every storage must go with its last reference."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collector()
def estimate(
    run: RunDescription,
    shape: ModelShape,
    *,
    software: Software,
    card: Card | None = None,
    length: int | None = None,
    eval_length: int | None = None,
    ranks: Ranks | None = None,
    images: Images | None = None,
) -> MemoryEstimate:
    """Predicts the fullest GPU's memory for a run, and main memory for all its processes here.

    Args:
        run: The run.
        shape: The model.
        software: Installed versions: the default optimizer and the layout of experts depend on them.
        card: The card; by default an Ampere one with expandable segments.
        length: Tokens of the longest sample, if it is known to be shorter than the cutoff.
        eval_length: The same for what is evaluated.
        ranks: How many processes train together; by default one.
        images: The images of a sample, or None for text.

    Raises:
        Unmodelled: The run takes a path that no formula here covers.
    """
    refuse(run, shape, software, images)
    shape, card, ranks = shape.under(software), card or Card(), ranks or Ranks()
    if run.fsdp_plan is not None:
        if ranks.world == 1:
            raise Unmodelled("FSDP shares a model among several processes, and this run has one")
        return FsdpEstimator(run, shape, software, card, length, ranks, eval_length=eval_length).result()
    kind = Estimator if run.deepspeed is None else _under_deepspeed(run, run.deepspeed, shape)
    found = kind(run, shape, software, card, length, ranks, images, eval_length).result()
    if images is None or images.exact:
        return found
    least = kind(run, shape, software, card, length, ranks, eval_length=eval_length).result()
    return replace(found, low_bytes=min(found.low_bytes, least.low_bytes))


def _under_deepspeed(run: RunDescription, config: Mapping[str, Any], shape: ModelShape) -> type[ShardedEstimator]:
    plan = ZeroPlan.from_config(config, hidden_size=shape.hidden_size)
    if plan.swaps:
        return SwappedShards
    return QuantizedShards if plan.stage == 3 and quantization(run, shape) is not None else ShardedEstimator
