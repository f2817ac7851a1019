"""How large a training's checkpoints are on disk, and how many of them it writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import MemoryEstimate, optimizers, statics
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


ADAPTERS = ("lora", "oft")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Bytes of one checkpoint: the model or its adapters, and what is needed to resume."""

    model: int
    states: int


def of_shape(run: RunDescription, shape: ModelShape, *, software: Software) -> Checkpoint | None:
    """The size from the model's shape, or None where what is trained is not known.

    The Trainer saves in the type that parameters have: 4 bytes for what is trained in float32. DeepSpeed writes 16-bit
    weights, and to resume 12 bytes for each trained element, a float32 copy and two moments (runtime/engine.py,
    `_save_zero_checkpoint`); up to stage 2 its own copy of the weights as well, without those that adapters leave
    frozen (transformers passes `exclude_frozen_parameters`).
    """
    try:
        return _of_shape(run, shape, software)
    except Unmodelled:
        return None


def _of_shape(run: RunDescription, shape: ModelShape, software: Software) -> Checkpoint:
    groups, types = statics.trainable_groups(run, shape), precision(run, shape)
    trained = statics.total(groups)
    every = statics.total(statics.model_groups(shape)) + (shape.vision.numel if shape.vision is not None else 0)
    adapts = run.finetuning_type in ADAPTERS
    frozen = 0 if adapts else every - trained
    if run.deepspeed is not None:
        saved = (trained + frozen) * dtypes.size(BFLOAT16)
        section = run.deepspeed.get("zero_optimization")
        shards_weights = isinstance(section, dict) and section.get("stage") == 3
        states = 3 * trained * dtypes.size(FLOAT32) + (0 if shards_weights else saved)
    else:
        saved = trained * dtypes.size(types.trained) + frozen * dtypes.size(types.loaded)
        states = (
            _states(run, trained)
            or optimizers.optimizer_memory(run, groups, types.trained, software=software, block=int).states
        )
    return Checkpoint(model=saved, states=0 if run.save_only_model else states)


def of_estimate(run: RunDescription, estimate: MemoryEstimate) -> Checkpoint:
    """The size of a checkpoint of a model whose shape is not known, from what lies on the card."""
    parts = estimate.components
    model = parts["adapters"] if run.finetuning_type in ADAPTERS else parts["weights"]
    return Checkpoint(model=model, states=0 if run.save_only_model else parts["optimizer"])


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


def _states(run: RunDescription, trained: int) -> int | None:
    """Bytes of a paged optimizer's states, which lie in main memory; None for others."""
    kind = optimizers.BITSANDBYTES.get(run.optim or "")
    return trained * kind.states * kind.bits // 8 if kind is not None and kind.paged else None
