"""Optimizers: what their states take on the card, and what a step allocates beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.statics import Group, tensor_bytes
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


STEP_BYTES = 4
MIN_8BIT_NUMEL = 4096
"""bitsandbytes keeps the states of smaller tensors in float32."""
MIN_PAGED_NUMEL = 100_000
"""bitsandbytes keeps the states of smaller tensors on the card even when it pages."""
STATE_BLOCK = 256
"""8-bit states that share one float32 absmax."""
SVD_COPIES = 4
"""Float32 matrices alive while one is decomposed: the gradient, its factors and the product."""
NEWTON_SCHULZ_COPIES = 4
"""Matrices alive in an iteration: the update, its square, a polynomial of it and the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerMemory:
    """Bytes between steps, and of what a step needs on top for a moment.

    Attributes:
        states: The optimizer's states.
        step: What a step needs beside them and the gradients.
        masters: Float32 copies of what trains in 16 bit, which no checkpoint keeps.
    """

    states: int
    step: int
    masters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bitsandbytes:
    """One of bitsandbytes' optimizers: `bits` of a state, how many states, and whether they are paged to the host."""

    bits: int
    states: int
    paged: bool


TORCH_ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf"}
BITSANDBYTES = {
    "adamw_8bit": Bitsandbytes(bits=8, states=2, paged=False),
    "adamw_bnb_8bit": Bitsandbytes(bits=8, states=2, paged=False),
    "paged_adamw": Bitsandbytes(bits=32, states=2, paged=True),
    "paged_adamw_32bit": Bitsandbytes(bits=32, states=2, paged=True),
    "paged_adamw_8bit": Bitsandbytes(bits=8, states=2, paged=True),
    "lion": Bitsandbytes(bits=32, states=1, paged=False),
    "lion_32bit": Bitsandbytes(bits=32, states=1, paged=False),
    "lion_8bit": Bitsandbytes(bits=8, states=1, paged=False),
    "paged_lion": Bitsandbytes(bits=32, states=1, paged=True),
    "paged_lion_32bit": Bitsandbytes(bits=32, states=1, paged=True),
    "paged_lion_8bit": Bitsandbytes(bits=8, states=1, paged=True),
    "rmsprop_bnb": Bitsandbytes(bits=32, states=1, paged=False),
    "rmsprop_bnb_8bit": Bitsandbytes(bits=8, states=1, paged=False),
}


def default_optimizer(software: Software) -> str:
    """Transformers' default: fused AdamW from torch 2.8 (and transformers 5) on."""
    return "adamw_torch_fused" if software.at_least("torch", 2, 8) else "adamw_torch"


def optimizer_memory(
    run: RunDescription, groups: Sequence[Group], trained: int, *, software: Software, block: Callable[[int], int]
) -> OptimizerMemory:
    """Bytes for the optimizer of a run.

    Args:
        run: The run.
        groups: What is trained.
        trained: Its type.
        software: Decides the default optimizer.
        block: Bytes that the allocator counts for a request.

    Raises:
        Unmodelled: An optimizer without a formula.
    """
    if run.use_adam_mini:
        raise Unmodelled("The optimizer of `use_adam_mini` has no formula yet")
    if run.use_badam:
        inner = optimizer_memory(replace(run, use_badam=False), groups, FLOAT32, software=software, block=block)
        return _blockwise(inner, groups, trained, block)
    if run.galore_layerwise or run.apollo_layerwise:
        raise Unmodelled("Layer-wise GaLore and APOLLO have no formula yet")
    if run.use_galore or run.use_apollo:
        targets = run.galore_target if run.use_galore else run.apollo_target
        if run.optim != "adamw_torch" or targets != ("all",):
            raise Unmodelled("GaLore and APOLLO have a formula for `optim: adamw_torch` and all linear layers only")
        rank = run.galore_rank if run.use_galore else run.apollo_rank
        return _low_rank(groups, trained, rank, block, keeps_factor=run.use_galore and trained == FLOAT32)
    if run.use_muon:
        return _muon(groups, block)
    name = run.optim or default_optimizer(software)
    itemsize = dtypes.size(trained)
    if name in TORCH_ADAMW:
        one = tensor_bytes(groups, itemsize, block)
        if name == "adamw_torch_fused":  # counts the steps of every tensor on the card
            return OptimizerMemory(states=2 * one + sum(group.count for group in groups) * block(STEP_BYTES), step=0)
        return OptimizerMemory(states=2 * one, step=one)  # foreach writes out the roots of all second moments
    if name == "sgd":
        return OptimizerMemory(states=0, step=0)
    if name == "adafactor":
        return _adafactor(groups, trained, block)
    if name in BITSANDBYTES:
        return _bitsandbytes(BITSANDBYTES[name], groups, block)
    raise Unmodelled(phrase("Optimizer `{name}` has no formula yet", name=name))


def _blockwise(
    inner: OptimizerMemory, groups: Sequence[Group], trained: int, block: Callable[[int], int]
) -> OptimizerMemory:
    """BAdam: the inner optimizer steps on float32 copies of the active layer, with float32 copies of its gradients.

    Source: badam/block_optim.py. The 16-bit gradients go one by one as their copies come; those last until all weights
    are written back, each through a copy in its own type. At a switch the former layer's copies and states are still
    there while the next one's copies are made, in the place of the gradients, so that takes no more.
    """
    masters = tensor_bytes(groups, dtypes.size(FLOAT32), block)
    replaced = tensor_bytes(groups, dtypes.size(trained), block)
    written = block(max(group.numel for group in groups) * dtypes.size(trained))
    return OptimizerMemory(states=inner.states, step=masters - replaced + max(inner.step, written), masters=masters)


def _bitsandbytes(kind: Bitsandbytes, groups: Sequence[Group], block: Callable[[int], int]) -> OptimizerMemory:
    """bitsandbytes.optim: transformers asks it to keep the states of embeddings in 32 bit."""
    states = 0
    for group in groups:
        eight = kind.bits == 8 and group.numel >= MIN_8BIT_NUMEL and not group.embedding
        paged = kind.paged and group.numel >= MIN_PAGED_NUMEL
        on_card = 0 if paged else block(group.numel * (1 if eight else dtypes.size(FLOAT32)))
        if eight:
            on_card += block(-(-group.numel // STATE_BLOCK) * dtypes.size(FLOAT32))
        states += kind.states * group.count * on_card
    return OptimizerMemory(states=states, step=0)


def _adafactor(groups: Sequence[Group], trained: int, block: Callable[[int], int]) -> OptimizerMemory:
    """Transformers' Adafactor: a row and a column of float32 for a matrix; a step works in float32 on one tensor.

    The rows and columns are below a thousandth of the matrices and are left out; vectors keep a full second moment.
    At the height of a step a tensor has its update, the factored estimate that replaces it and, in 16 bit, float32
    copies of gradient and parameter.
    """
    vectors = [group for group in groups if not group.matrix]
    largest = max((group.numel for group in groups), default=0) * dtypes.size(FLOAT32)
    copies = 2 if trained == FLOAT32 else 4
    return OptimizerMemory(states=tensor_bytes(vectors, dtypes.size(FLOAT32), block), step=copies * block(largest))


def _low_rank(
    groups: Sequence[Group], trained: int, rank: int, block: Callable[[int], int], *, keeps_factor: bool
) -> OptimizerMemory:
    """GaLore and APOLLO: a projection of the short side and two states of the long one for every matrix.

    Source: galore_torch/galore_projector.py and adamw.py, apollo_torch; measured alike (held_out_1). Everything else
    has plain AdamW states. Renewing a projection decomposes one matrix at a time in float32. GaLore keeps rows of the
    factor as a view, so that without a cast to 16 bit the whole factor stays (held_out_3).
    """
    itemsize = dtypes.size(trained)
    states = step = 0
    for group in groups:
        if group.matrix and group.in_layers:
            short, long = sorted((group.width, group.numel // group.width))
            kept = min(rank, short)
            projection = (short if keeps_factor else kept) * short
            states += group.count * (block(projection * itemsize) + 2 * block(kept * long * itemsize))
            step = max(step, SVD_COPIES * block(group.numel * dtypes.size(FLOAT32)))
        else:
            states += 2 * group.count * block(group.numel * itemsize)
    return OptimizerMemory(states=states, step=step)


def _muon(groups: Sequence[Group], block: Callable[[int], int]) -> OptimizerMemory:
    """LLaMA-Factory's Muon: one momentum for a hidden matrix, AdamW's two for the rest, all in float32.

    Source: llamafactory/third_party/muon. Newton-Schulz works in bfloat16 on one matrix at a time.
    """
    states = step = 0
    for group in groups:
        hidden = group.matrix and group.in_layers
        states += (1 if hidden else 2) * group.count * block(group.numel * dtypes.size(FLOAT32))
        if hidden:
            step = max(step, NEWTON_SCHULZ_COPIES * block(group.numel * dtypes.size(BFLOAT16)))
    return OptimizerMemory(states=states, step=step)
