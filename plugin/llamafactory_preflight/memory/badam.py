"""BAdam, layer by layer: which layer trains in a step, and whether the optimizer has states for it by then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


MODES = ("ascending", "descending", "random", "fixed")
OPTIMIZERS = (None, "adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A step with `block` as its active layer; `first` is one behind a switch, which took the states with it."""

    block: int
    first: bool


def fullest(run: RunDescription, num_layers: int) -> list[Visit]:
    """The lowest layer that trains, and the lowest one that trains with states: one of them has the highest peak.

    Layers above the active one keep all for the backward, as LLaMA-Factory checkpoints none that does not train; those
    below keep nothing.
    """
    visits = set(_visits(run, num_layers))
    lowest = {first: min((v.block for v in visits if v.first is first), default=None) for first in (True, False)}
    return [Visit(block=block, first=first) for first, block in lowest.items() if block is not None]


def remark(run: RunDescription, num_layers: int) -> str:
    """Which layers a run reaches, as the estimate takes them."""
    lowest = min(visit.block for visit in _visits(run, num_layers))
    if run.badam_switch_mode == "random":
        return "BAdam draws its layers: the first one is taken to be among them, as the lowest takes most."
    if run.max_steps > 0 or run.badam_switch_mode == "fixed":
        return f"The lowest layer that BAdam trains in this run takes most: number {lowest}, counted from 0."
    return "BAdam is taken to reach every layer, as without `max_steps` the number of steps is not known."


def _visits(run: RunDescription, num_layers: int) -> Iterator[Visit]:
    """The kinds of steps of a run, up to its end or the end of one round through all layers.

    Source: badam/block_optim.py. The optimizer counts a step before it looks whether to switch, and looks whether the
    *next* count divides: the first layer gets a step less than the others. The sign of the interval does not matter,
    so -1 switches after every step. A random order may begin with any layer.
    """
    interval = abs(run.badam_switch_interval or 1)
    block = 0 if run.badam_switch_mode == "random" else _start(run, num_layers)
    direction = {"ascending": 1, "descending": -1}.get(run.badam_switch_mode or "", 0)
    left = run.max_steps if run.max_steps > 0 else interval * (num_layers + 1)
    steps = max(interval - 1, 1)
    for number in range(num_layers + 1):
        active = (block + number * direction) % num_layers
        if left > 0:
            yield Visit(block=active, first=True)
        if min(steps, left) > 1:
            yield Visit(block=active, first=False)
        left -= steps
        steps = interval


def _start(run: RunDescription, num_layers: int) -> int:
    if run.badam_start_block is not None:
        return run.badam_start_block
    return num_layers - 1 if run.badam_switch_mode == "descending" else 0


def reasons(run: RunDescription, shape: ModelShape) -> Iterator[str]:
    """One sentence for every path of a run with BAdam that has no formula, or that BAdam fails on."""
    if run.finetuning_type != "full":
        yield phrase("BAdam with `finetuning_type: {name}` has no formula yet", name=run.finetuning_type)
    if run.badam_mode != "layer":
        yield phrase("BAdam with `badam_mode: {name}` has no formula yet", name=run.badam_mode)
    if run.stage not in ("pt", "sft"):
        yield phrase("BAdam in stage `{stage}` has no formula yet", stage=run.stage)
    if run.deepspeed is not None or run.fsdp_plan is not None:
        yield "BAdam under DeepSpeed and FSDP has no formula yet"
    if shape.moe is not None or shape.vision is not None:
        yield "BAdam on experts and vision models has no formula yet"
    if run.fp16 or dtypes.named(shape.dtype) != BFLOAT16:
        yield "BAdam has a formula for checkpoints in bfloat16 that train without fp16 only"
    if run.optim not in OPTIMIZERS or run.use_muon or run.use_adam_mini:
        yield "BAdam has a formula around torch's AdamW only"
    if run.upcast_layernorm or (run.gradient_checkpointing and run.disable_gradient_checkpointing):
        yield "BAdam with `upcast_layernorm` or the Trainer's own gradient checkpointing has no formula yet"
    yield from _invalid(run, shape.num_layers)


def _invalid(run: RunDescription, num_layers: int) -> Iterator[str]:
    if run.badam_switch_mode not in MODES:
        yield phrase("BAdam knows no `badam_switch_mode: {name}`", name=run.badam_switch_mode)
    if not run.badam_switch_interval:
        yield "BAdam fails without a `badam_switch_interval` other than 0"
    if run.badam_switch_mode == "fixed" and run.badam_start_block is None:
        yield "BAdam fails with `badam_switch_mode: fixed` and no `badam_start_block`"
    start = run.badam_start_block
    if start is not None and not -num_layers <= start < num_layers:
        yield phrase(
            "BAdam fails with `badam_start_block: {start}`: there are {num} layers", start=start, num=num_layers
        )
