"""Linear layers as PEFT and bitsandbytes run them: plain, quantized, with LoRA or DoRA around either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamafactory_preflight.memory.layers import norms
from llamafactory_preflight.memory.layers.attention import matmul
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT16, FLOAT32, INT8
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Gradients, Storage, Tensor
from llamafactory_preflight.memory.paper.module_hooks import ADAPTER
from llamafactory_preflight.memory.paper.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a frozen base weight is stored and brought back for a product."""

    bits: int
    compute_dtype: int
    bitsandbytes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A LoRA adapter of one linear layer."""

    a: Weight
    b: Weight
    dropout: float
    magnitude: Weight | None = None


CAYLEY_MATRICES = 7
"""Matrices that a series of five terms keeps for its backward: both factors of three products, and the skew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Oft:
    """An orthogonal rotation of a linear layer's input, in blocks of `block_size`."""

    weight: Weight
    block_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer; `quantization`, `lora` and `oft` are None where they do not apply.

    With `bypassed` PEFT's module returns what its base layer does (disable_adapter).
    """

    weight: Weight
    quantization: Quantization | None = None
    lora: Lora | None = None
    oft: Oft | None = None
    bypassed: bool = False

    def trained(self) -> Iterator[Weight]:
        """The weights that get a gradient."""
        adapter = (self.lora.a, self.lora.b, self.lora.magnitude) if self.lora is not None else ()
        yield from (weight for weight in (self.weight, *adapter) if weight is not None and weight.node is not None)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Runs the layer on a batch of rows."""
        if self.oft is not None:
            return ops.cast(self._base(ops, self._rotated(ops, x, self.oft)), x.dtype)
        if self.lora is None:
            return self._base(ops, x)
        lora = self.lora
        if self.bypassed:
            return ops.module(x, lora.a, lambda x: self._base(ops, x), name=ADAPTER)
        return ops.module(x, lora.a, lambda x: self._adapted(ops, x, lora), name=ADAPTER)

    def _base(self, ops: Ops, x: Tensor) -> Tensor:
        if self.quantization is None:
            return ops.linear(x, self.weight)
        if self.quantization.bits == 4 or not self.quantization.bitsandbytes:
            dtype = self.quantization.compute_dtype
            return ops.module(x, self.weight, lambda x: self._matmul_4bit(ops, x, dtype))
        return self._matmul_8bit(ops, x)

    def _adapted(self, ops: Ops, x: Tensor, lora: Lora) -> Tensor:
        """peft.tuners.lora.layer.Linear: the input is cast to the adapter's type whatever autocast does next."""
        if self.quantization is not None and self.quantization.bitsandbytes:
            return self._adapted_quantized(ops, x, lora, self.quantization.bits)
        result = self._base(ops, x)
        dtype = result.dtype
        ops.borrow(lora.a)
        x = ops.cast(x, lora.a.dtype)
        if lora.magnitude is None:
            update = ops.scale(ops.linear(ops.linear(_dropped(ops, x, lora), lora.a), lora.b))
        else:
            update = self._dora(ops, x, result, lora, lora.magnitude)
        result = ops.add(result, update)
        return ops.cast(result, dtype)

    def _adapted_quantized(self, ops: Ops, x: Tensor, lora: Lora, bits: int) -> Tensor:
        """peft.tuners.lora.bnb: casts the input only without autocast; 4 bit clones the base result first."""
        result = self._base(ops, x)
        if bits == 4:
            result = ops.clone(result)
        dtype = result.dtype
        if ops.autocast_cache is None:
            ops.borrow(lora.a)
            x = ops.cast(x, lora.a.dtype)
        if lora.magnitude is None:
            update = ops.scale(ops.linear(ops.linear(_dropped(ops, x, lora), lora.a), lora.b))
            update = ops.cast(update, dtype) if ops.autocast_cache is None else update
        else:
            update = self._dora(ops, x, result, lora, lora.magnitude)
        return ops.cast(ops.add(result, update), dtype)

    def _rotated(self, ops: Ops, x: Tensor, oft: Oft) -> Tensor:
        """peft.tuners.oft: the rotation from its Cayley series, a product per block, and back to the input's type."""
        given, wide = x.dtype, self.quantization is None or ops.autocast_cache is None
        x = ops.cast(x, oft.weight.dtype)
        rotation = self._cayley(ops, oft)
        out = ops.clone(matmul(ops, x, rotation, x.numel))
        del rotation
        return ops.cast(ops.cast(out, x.dtype) if wide else out, given)

    def _cayley(self, ops: Ops, oft: Oft) -> Tensor:
        numel = self.weight.width * oft.block_size
        size = numel * dtypes.size(ops.lower_dtype(oft.weight.dtype))
        rotation = ops.empty(numel, oft.weight.dtype)
        kept = ops.storage(CAYLEY_MATRICES * size)

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (ops.storage(oft.weight.nbytes, "gradients"),)

        return ops.link(rotation, (oft.weight,), (kept,), backward)

    def _dora(self, ops: Ops, x: Tensor, result: Tensor, lora: Lora, magnitude: Weight) -> Tensor:
        """peft.tuners.lora.dora: builds the full update to norm its rows, and holds it until it returns.

        With dropout the base product is made once more, of the dropped input and a copy of the weight in its type.
        """
        weight, numel = self.weight, self.weight.numel
        x = ops.dropout(x, lora.dropout)
        eye = ops.empty(weight.width**2, x.dtype, "buffers")
        update = ops.linear(ops.linear(eye, lora.a), lora.b, "buffers")
        if x.dtype != weight.dtype or self.quantization is not None:
            weight = Weight(numel, x.dtype, ops.storage(numel * dtypes.size(x.dtype), "buffers"), width=weight.width)
        scaled = ops.empty(numel, update.dtype, "buffers")
        summed = ops.empty(numel, dtypes.promote(x.dtype, update.dtype), "buffers")
        del scaled, summed
        low_rank = ops.linear(ops.linear(x, lora.a), lora.b)
        base = ops.linear(x, weight) if lora.dropout else result
        out = ops.add(norms.mul_weight(ops, base, magnitude), ops.scale(norms.mul_weight(ops, low_rank, magnitude)))
        del eye, update, weight
        return out

    def _matmul_4bit(self, ops: Ops, x: Tensor, dtype: int) -> Tensor:
        """bitsandbytes.matmul_4bit: brings the whole weight back to 16 bit, forward and backward.

        The function itself keeps a view of the packed weight, not autograd, so it lives as long as the graph does.
        """
        numel, given = self.weight.numel, x.dtype
        x = ops.cast(x, dtype)
        dequantized = ops.empty(numel, dtype, "buffers")
        out = ops.empty(x.numel // self.weight.width * (numel // self.weight.width), dtype)
        del dequantized
        size, kept = x.numel * dtypes.size(dtype), ops.view(self.weight)

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            assert kept is not None
            dequantized = ops.storage(numel * dtypes.size(dtype), "buffers")
            dx = ops.storage(size)
            del dequantized
            return (dx,)

        return ops.cast(ops.link(out, (x,), (self.weight.storage,), backward), given)

    def _matmul_8bit(self, ops: Ops, x: Tensor) -> Tensor:
        """bitsandbytes.MatMul8bitLt: keeps its input on the function itself, so it lives as long as the graph does."""
        numel = self.weight.numel
        rows, dtype = x.numel // self.weight.width, x.dtype
        quantized = ops.empty(x.numel, INT8)
        half = ops.empty(x.numel, FLOAT16) if dtype != FLOAT16 else None
        magnitudes = ops.empty(x.numel, FLOAT16)
        outliers = ops.empty(x.numel, INT8)
        del half, magnitudes, outliers
        product = ops.empty(rows * (numel // self.weight.width), FLOAT32)
        half_product = ops.empty(product.numel, FLOAT16)
        out = ops.empty(product.numel, dtype)
        del quantized, product, half_product
        size, kept = x.nbytes, x.storage

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            assert kept is not None
            dequantized = ops.storage(numel * dtypes.size(dtype), "buffers")
            dx = ops.storage(size)
            del dequantized
            return (dx,)

        return ops.link(out, (x,), (), backward)


def _dropped(ops: Ops, x: Tensor, lora: Lora) -> Tensor:
    """PEFT's dropout, a module of its own even where it does nothing."""
    ops.begin_container()
    return ops.end_container(ops.dropout(x, lora.dropout))
