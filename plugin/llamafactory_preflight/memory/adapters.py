"""Linear layers as PEFT and bitsandbytes run them: plain, quantized, with LoRA or DoRA around either."""

from __future__ import annotations

from dataclasses import dataclass

from llamafactory_preflight.memory.ops import FLOAT32, Ops, Weight
from llamafactory_preflight.memory.paper import Gradients, Storage, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a frozen base weight is stored and brought back for a product."""

    bits: int
    compute_itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A LoRA adapter of one linear layer."""

    a: Weight
    b: Weight
    dropout: float
    magnitude: Weight | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer; `quantization` and `lora` are None where they do not apply."""

    weight: Weight
    quantization: Quantization | None = None
    lora: Lora | None = None
    has_bias: bool = False

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Runs the layer on a batch of rows."""
        if self.lora is None:
            return self._base(ops, x)
        if self.quantization is not None:
            return self._lora_quantized(ops, x, self.lora, self.quantization.bits)
        return self._lora(ops, x, self.lora)

    def _base(self, ops: Ops, x: Tensor) -> Tensor:
        if self.quantization is None:
            return ops.linear(x, self.weight)
        if self.quantization.bits == 4:
            return self._matmul_4bit(ops, x, self.quantization.compute_itemsize)
        return self._matmul_8bit(ops, x, self.quantization.compute_itemsize)

    def _lora(self, ops: Ops, x: Tensor, lora: Lora) -> Tensor:
        """peft.tuners.lora.layer.Linear: the input is cast to the adapter's type whatever autocast does next."""
        result = self._base(ops, x)
        itemsize = result.itemsize
        x = ops.cast(x, lora.a.itemsize)
        if lora.magnitude is None:
            update = ops.scale(ops.linear(ops.linear(ops.dropout(x, lora.dropout), lora.a), lora.b))
        else:
            update = self._dora(ops, x, result, lora, lora.magnitude)
        result = ops.add(result, update)
        return ops.cast(result, itemsize)

    def _lora_quantized(self, ops: Ops, x: Tensor, lora: Lora, bits: int) -> Tensor:
        """peft.tuners.lora.bnb: casts the input only where there is no autocast; 4 bit clones the base result first."""
        result = self._base(ops, x)
        if bits == 4:
            result = ops.clone(result)
        itemsize = result.itemsize
        if ops.autocast_cache is None:
            x = ops.cast(x, lora.a.itemsize)
        if lora.magnitude is None:
            update = ops.scale(ops.linear(ops.linear(ops.dropout(x, lora.dropout), lora.a), lora.b))
            update = ops.cast(update, itemsize) if ops.autocast_cache is None else update
        else:
            update = self._dora(ops, x, result, lora, lora.magnitude)
        return ops.cast(ops.add(result, update), itemsize)

    def _dora(self, ops: Ops, x: Tensor, result: Tensor, lora: Lora, magnitude: Weight) -> Tensor:
        """peft.tuners.lora.dora: builds the full update once a call to norm its rows, outside of the graph."""
        numel = self.weight.numel
        eye = ops.empty(self.weight.width**2, x.itemsize, "buffers")
        update = ops.linear(ops.linear(eye, lora.a), lora.b, "buffers")
        del eye
        weight = ops.empty(numel, x.itemsize, "buffers")
        scaled = ops.empty(numel, x.itemsize, "buffers")
        summed = ops.empty(numel, max(x.itemsize, FLOAT32), "buffers")
        del scaled, update, weight, summed
        low_rank = ops.linear(ops.linear(x, lora.a), lora.b)
        scaled_base = self._by_magnitude(ops, result, magnitude)
        scaled_update = ops.scale(self._by_magnitude(ops, low_rank, magnitude))
        return ops.add(scaled_base, scaled_update)

    def _by_magnitude(self, ops: Ops, x: Tensor, magnitude: Weight) -> Tensor:
        return ops.mul_weight(x, magnitude)

    def _matmul_4bit(self, ops: Ops, x: Tensor, itemsize: int) -> Tensor:
        """bitsandbytes.matmul_4bit: the whole weight is brought back to 16 bit for the product, forward and backward."""
        numel = self.weight.numel
        x = ops.cast(x, itemsize)
        dequantized = ops.empty(numel, itemsize, "buffers")
        out = ops.empty(x.numel // self.weight.width * (numel // self.weight.width), itemsize)
        del dequantized
        size = x.numel * itemsize

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            dequantized = Storage(ops.ledger, numel * itemsize, "buffers")
            dx = Storage(ops.ledger, size, "activations")
            del dequantized
            return (dx,)

        return ops.link(out, (x,), (self.weight.storage,), backward)

    def _matmul_8bit(self, ops: Ops, x: Tensor, itemsize: int) -> Tensor:
        """bitsandbytes.MatMul8bitLt: keeps its input on the function itself, so it lives as long as the graph does."""
        numel = self.weight.numel
        rows = x.numel // self.weight.width
        x = ops.cast(x, itemsize)
        quantized = ops.empty(x.numel, 1)
        half = ops.empty(x.numel, 2) if itemsize != 2 else None
        magnitudes = ops.empty(x.numel, 2)
        outliers = ops.empty(x.numel, 1)
        del half, magnitudes, outliers
        product = ops.empty(rows * (numel // self.weight.width), 4)
        half_product = ops.empty(product.numel, 2)
        out = ops.empty(product.numel, itemsize)
        del quantized, product, half_product
        size, kept = x.numel * itemsize, x.storage

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            assert kept is not None
            dequantized = Storage(ops.ledger, numel * itemsize, "buffers")
            dx = Storage(ops.ledger, size, "activations")
            del dequantized
            return (dx,)

        return ops.link(out, (x,), (), backward)
