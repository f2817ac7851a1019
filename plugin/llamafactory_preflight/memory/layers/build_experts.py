"""Builds the MLP of a sparse layer, as the installed transformers has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import parameters
from llamafactory_preflight.memory.layers.adapters import Linear
from llamafactory_preflight.memory.layers.expert_list import NUM_RUN, ExpertList
from llamafactory_preflight.memory.layers.experts import Experts


if TYPE_CHECKING:
    from llamafactory_preflight.memory.layers.build import Builder


def experts(builder: Builder, *, router: Linear | None, trained: bool) -> Experts | ExpertList | None:
    """The experts of a layer, or None in a dense one.

    Args:
        builder: Makes their weights.
        router: The router, where it is a linear layer of its own.
        trained: Whether they are trained themselves.

    Raises:
        Unmodelled: Ranks share the gradients of a list of experts.
    """
    return _stacked(builder, trained=trained) if router is None else _listed(builder, router, trained=trained)


def _stacked(builder: Builder, *, trained: bool) -> Experts | None:
    moe, hidden = builder.shape.moe, builder.shape.hidden_size
    if moe is None:
        return None
    numel, gate_up, down = parameters.expert_tensors(builder.shape)
    router = builder.weight("router", numel, trained=trained, width=hidden)
    router.key = None  # no module of its own to DeepSpeed
    return Experts(
        router=router,
        gate_up=builder.weight("gate_up", gate_up, trained=trained, width=hidden),
        down=builder.weight("down", down, trained=trained, width=moe.intermediate_size),
        num_experts=moe.num_experts,
        per_token=moe.num_experts_per_token,
        intermediate_size=moe.intermediate_size,
        liger=builder.kernels.liger,
        tunes=builder.first_step,
    )


def _listed(builder: Builder, router: Linear, *, trained: bool) -> ExpertList:
    if builder.gradients is not None:
        raise Unmodelled("The experts of transformers 4 have no formula under ZeRO yet")
    moe = builder.shape.moe
    assert moe is not None
    linears = parameters.expert_linears(builder.shape).items()
    return ExpertList(
        router=router,
        mlps=[
            {name: builder.linear(name, linear, trained=trained) for name, linear in linears}
            for _ in range(min(NUM_RUN, moe.num_experts))
        ],
        num_experts=moe.num_experts,
        per_token=moe.num_experts_per_token,
        liger=builder.kernels.liger,
        others=builder.leaf(),
    )
