"""Optimizers: what their states take on the card, and what a step allocates beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import dtypes
from llamafactory_preflight.memory.dtypes import FLOAT32
from llamafactory_preflight.memory.statics import Group, tensor_bytes
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


MIN_8BIT_NUMEL = 4096
"""bitsandbytes keeps the states of smaller tensors in float32."""
MIN_PAGED_NUMEL = 100_000
"""bitsandbytes keeps the states of smaller tensors on the card even when it pages."""
STATE_BLOCK = 256
"""8-bit states that share one float32 absmax."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerMemory:
    """Bytes of the states between steps, and of what a step needs on top for a moment."""

    states: int
    step: int


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
    """transformers' default: fused AdamW from torch 2.8 (and transformers 5) on."""
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
    for name in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"):
        if getattr(run, name):
            raise Unmodelled(f"The optimizer of `{name}` has no formula yet")
    name = run.optim or default_optimizer(software)
    itemsize = dtypes.size(trained)
    if name in TORCH_ADAMW:
        one = tensor_bytes(groups, itemsize, block)
        foreach = name != "adamw_torch_fused"  # the foreach kernel writes out the square roots of all second moments
        return OptimizerMemory(states=2 * one, step=one if foreach else 0)
    if name == "sgd":
        return OptimizerMemory(states=0, step=0)
    if name == "adafactor":
        return _adafactor(groups, trained, block)
    if name in BITSANDBYTES:
        return _bitsandbytes(BITSANDBYTES[name], groups, block)
    raise Unmodelled(f"Optimizer `{name}` has no formula yet")


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
    """transformers' Adafactor: a row and a column of float32 for a matrix; a step works in float32 on one tensor.

    The rows and columns are below a thousandth of the matrices and are left out; vectors keep a full second moment. At the
    height of a step a tensor has its update, the factored estimate that replaces it and, in 16 bit, float32 copies of
    gradient and parameter.
    """
    vectors = [group for group in groups if not group.matrix]
    largest = max((group.numel for group in groups), default=0) * dtypes.size(FLOAT32)
    copies = 2 if trained == FLOAT32 else 4
    return OptimizerMemory(states=tensor_bytes(vectors, dtypes.size(FLOAT32), block), step=copies * block(largest))
