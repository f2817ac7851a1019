"""Norms on paper: RMSNorm in elementary operations, Gemma's, liger's; LayerNorm; liger's gated activation."""

from __future__ import annotations

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops


def rms_norm(ops: Ops, x: Tensor, weight: Weight) -> Tensor:
    """Transformers' RMSNorm in elementary operations: to float32, x * rsqrt(mean(x^2)), back, times the weight."""
    normed = ops.cast(_normed(ops, x, weight), x.dtype)
    return mul_weight(ops, normed, weight)


def wide_rms_norm(ops: Ops, x: Tensor, weight: Weight) -> Tensor:
    """Gemma's RMSNorm: the product with 1 + weight is still float32."""
    normed = _normed(ops, x, weight)
    wide = Weight(weight.numel, FLOAT32, weight.storage, leaf=weight.node if isinstance(weight.node, Leaf) else None)
    return ops.cast(mul_weight(ops, normed, wide), x.dtype)


def _normed(ops: Ops, x: Tensor, weight: Weight) -> Tensor:
    high = ops.cast(x, FLOAT32)
    rows = x.numel // weight.numel
    rstd = _rstd(ops, high, rows)
    normed = ops.empty(x.numel, FLOAT32)
    wide = x.numel * dtypes.size(FLOAT32)

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        high_part = ops.storage(wide)
        product = ops.storage(wide)  # grad * x, summed over the row
        del product
        return (high_part, ops.storage(rows * dtypes.size(FLOAT32)))

    return ops.link(normed, (high, rstd), (high.storage, rstd.storage), backward)


def _rstd(ops: Ops, high: Tensor, rows: int) -> Tensor:
    squared = ops.empty(high.numel, FLOAT32)
    out = ops.empty(rows, FLOAT32)
    del squared
    wide = high.numel * dtypes.size(FLOAT32)

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        spread = ops.storage(wide)  # mean's gradient, written out
        base = ops.storage(wide)  # x ** 1
        twice = ops.storage(wide)
        del base
        out = ops.storage(wide)
        del twice, spread
        return (out,)

    return ops.link(out, (high,), (high.storage,), backward)


def mul_weight(ops: Ops, x: Tensor, weight: Weight) -> Tensor:
    """X * weight broadcast over rows, the weight possibly trainable and wider."""
    dtype = dtypes.promote(x.dtype, weight.dtype)
    out = ops.empty(x.numel, dtype)
    saved = (weight.storage,) + ((x.storage,) if weight.node is not None else ())
    sizes = (x.numel * dtypes.size(dtype), x.nbytes)
    trained = weight.node is not None
    dw = weight.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        dx = ops.product_gradient(sizes)
        if not trained:
            return (dx, None)
        product = ops.storage(sizes[0])
        del product
        return (dx, ops.storage(dw, "gradients"))

    return ops.link(out, (x, weight), saved, backward)


def layer_norm(ops: Ops, x: Tensor, weight: Weight, *, liger: bool) -> Tensor:
    """F.layer_norm with frozen weights: autocast has it compute, and answer, in float32, which liger's does not."""
    x = x if liger or ops.autocast_cache is None else ops.cast(x, FLOAT32)
    out = ops.empty(x.numel, x.dtype)
    statistics = ops.storage(2 * (x.numel // weight.numel) * dtypes.size(FLOAT32))
    size = x.nbytes
    return ops.link(out, (x,), (x.storage, weight.storage, statistics), lambda grad, saved: (ops.storage(size),))


def liger_rms_norm(ops: Ops, x: Tensor, weight: Weight, *, in_place: bool = True) -> Tensor:
    """liger_kernel.ops.rms_norm: saves its input and one float32 a row; the backward reuses the gradient's memory."""
    out = ops.empty(x.numel, x.dtype)
    rstd = ops.storage(x.numel // weight.numel * dtypes.size(FLOAT32))
    size, dw = x.nbytes, weight.nbytes
    trained = weight.node is not None

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        dx = grad if in_place else ops.storage(size)
        return (dx, ops.storage(dw, "gradients") if trained else None)

    return ops.link(out, (x, weight), (x.storage, weight.storage, rstd), backward)


def liger_silu_mul(ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
    """liger_kernel.ops.swiglu: saves both inputs and writes their gradients over them."""
    out = ops.empty(gate.numel, gate.dtype)

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return saved

    return ops.link(out, (gate, up), (gate.storage, up.storage), backward)
