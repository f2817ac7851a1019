"""A gated MLP on paper: that of a dense layer, and each expert of a sparse one."""

from __future__ import annotations

from collections.abc import Mapping

from llamafactory_preflight.memory.layers import norms
from llamafactory_preflight.memory.layers.adapters import Linear
from llamafactory_preflight.memory.paper.ledger import Tensor
from llamafactory_preflight.memory.paper.ops import Ops


def gated_mlp(ops: Ops, linears: Mapping[str, Linear], hidden: Tensor, *, liger: bool) -> Tensor:
    """down(silu(gate(x)) * up(x)), transformers' or liger's."""
    ops.begin_container()
    return ops.end_container(linears["down_proj"](ops, _gated(ops, linears, hidden, liger=liger)))


def _gated(ops: Ops, linears: Mapping[str, Linear], hidden: Tensor, *, liger: bool) -> Tensor:
    gate = linears["gate_proj"](ops, hidden)
    if liger:
        return norms.liger_silu_mul(ops, gate, linears["up_proj"](ops, hidden))
    ops.begin_container()
    gate = ops.end_container(ops.unary(gate))
    return ops.mul(gate, linears["up_proj"](ops, hidden))
