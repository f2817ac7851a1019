"""The operations a decoder is made of, on paper: what each allocates, saves for its backward, and allocates there.

Each one names the PyTorch function it stands for. Sizes are elements; `dtype` is bytes an element.
"""

from __future__ import annotations

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Graph, Weight
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Storage, Tensor


class Ops(Graph):
    """PyTorch's functional interface on paper."""

    # casts -------------------------------------------------------------------------------------------------------

    def cast(self, x: Tensor, dtype: int, component: str = "activations") -> Tensor:
        """Tensor.to(dtype): the same tensor where nothing changes."""
        if x.dtype == dtype:
            return x
        out = self.empty(x.numel, dtype, component)
        size, gradient = x.nbytes, "gradients" if isinstance(x.node, Leaf) else component

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (self.storage(size, gradient),)

        return self.link(out, (x,), (), backward)

    def lower(self, x: Tensor) -> Tensor:
        """What autocast does to an activation that enters a matrix product or attention."""
        return x if self.autocast_cache is None or self.autocast_dtype is None else self.cast(x, self.autocast_dtype)

    def lower_dtype(self, dtype: int) -> int:
        """The type that an activation of `dtype` has in a matrix product or in attention."""
        return dtype if self.autocast_cache is None or self.autocast_dtype is None else self.autocast_dtype

    def lower_weight(self, weight: Weight) -> Tensor:
        """As `lower`; a trainable float32 parameter is cast once and kept until autocast ends."""
        if self.autocast_cache is None or self.autocast_dtype in (None, weight.dtype):
            return weight
        cached = self.autocast_cache.get(weight)
        if cached is None:
            cached = self.cast(weight, self.autocast_dtype or weight.dtype, "buffers")
            if weight.node is not None and weight.dtype == FLOAT32:
                self.autocast_cache[weight] = cached
        return cached

    # arithmetic --------------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise a + b of one shape, in the wider type; gradients return in each input's own type."""
        dtype = dtypes.promote(a.dtype, b.dtype)
        out = self.empty(a.numel, dtype)
        sizes = (a.nbytes, b.nbytes)
        same = (a.dtype == dtype, b.dtype == dtype)

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return tuple(grad if equal else self.storage(size) for equal, size in zip(same, sizes, strict=True))

        return self.link(out, (a, b), (), backward)

    def scale(self, x: Tensor) -> Tensor:
        """X * number."""
        out = self.empty(x.numel, x.dtype)
        size = x.nbytes
        return self.link(out, (x,), (), lambda grad, saved: (self.storage(size),))

    def clone(self, x: Tensor) -> Tensor:
        """Tensor.clone: its gradient passes through untouched."""
        return self.link(self.empty(x.numel, x.dtype), (x,), (), lambda grad, saved: (grad,))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise a * b of one shape: each saves the other where that one needs a gradient."""
        dtype = dtypes.promote(a.dtype, b.dtype)
        out = self.empty(a.numel, dtype)
        saved = tuple(o.storage for x, o in ((a, b), (b, a)) if x.node is not None)
        sizes = tuple((x.numel * dtypes.size(dtype), x.nbytes) if x.node is not None else None for x in (a, b))

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return tuple(self.product_gradient(size) for size in sizes)

        return self.link(out, (a, b), saved, backward)

    def product_gradient(self, sizes: tuple[int, int] | None) -> Storage | None:
        """A product's gradient, made in the wide type and cast to the input's; `sizes` are the two in bytes."""
        if sizes is None:
            return None
        wide = self.storage(sizes[0])
        return wide if sizes[0] == sizes[1] else self.storage(sizes[1])

    def mul_constant(self, x: Tensor, constant: Tensor, *, dtype: int | None = None) -> Tensor:
        """X * a broadcast tensor without gradient, which is saved."""
        dtype = dtype or dtypes.promote(x.dtype, constant.dtype)
        out = self.empty(x.numel, dtype)
        size = x.numel * dtypes.size(dtype), x.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (self.product_gradient(size),)

        return self.link(out, (x,), (constant.storage,), backward)

    def unary(self, x: Tensor) -> Tensor:
        """An activation function that saves its input (silu, gelu)."""
        out = self.empty(x.numel, x.dtype)
        size = x.nbytes
        return self.link(out, (x,), (x.storage,), lambda grad, saved: (self.storage(size),))

    def quick_gelu(self, x: Tensor) -> Tensor:
        """X * sigmoid(1.702 * x), in elementary operations."""
        scaled = self.scale(x)
        gate = self.empty(x.numel, x.dtype)
        size = x.nbytes
        gate = self.link(gate, (scaled,), (gate.storage,), lambda grad, saved: (self.storage(size),))
        del scaled
        return self.mul(x, gate)

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """torch.native_dropout: saves a mask of one byte an element."""
        if probability == 0.0:
            return x
        out = self.empty(x.numel, x.dtype)
        mask = self.storage(x.numel)
        size = x.nbytes
        return self.link(out, (x,), (mask,), lambda grad, saved: (self.storage(size),))

    # matrix products ---------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Weight, component: str = "activations") -> Tensor:
        """F.linear under autocast: saves the input for a trained weight, the weight for the input's gradient."""
        return self.module(x, weight, lambda x: self._linear(x, weight, component))

    def _linear(self, x: Tensor, weight: Weight, component: str) -> Tensor:
        x, used = self.lower(x), self.lower_weight(weight)
        rows = x.numel // weight.width
        out = self.empty(rows * (weight.numel // weight.width), x.dtype, component)
        saved: tuple[Storage, ...] = ()
        if used.node is not None or self.own_linear:  # DeepSpeed's own function saves its input always
            saved += (x.storage,)
        if x.node is not None:
            saved += (used.storage if self.own_linear or used is not weight else self.view(weight),)
        dx = x.nbytes if x.node is not None else 0
        dw = used.nbytes if used.node is not None else 0
        owner = "gradients" if used is weight else "buffers"
        viewed = not self.own_linear

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            to_input = Storage(self.ledger, dx, "activations", viewed=viewed) if dx else None
            return (to_input, Storage(self.ledger, dw, owner, viewed=viewed) if dw else None)

        return self.link(out, (x, used), saved, backward)

    def embedding(self, rows: int, weight: Weight, *, as_leaf: bool = False) -> Tensor:
        """F.embedding: its backward makes a dense gradient of the whole table.

        With `as_leaf` the output is made to require a gradient (enable_input_require_grads) where the table does not;
        that hook runs before DeepSpeed's, which therefore gather a frozen table in the backward too.
        """
        return self.module(
            Tensor(0, weight.dtype, weight.storage),
            weight,
            lambda ids: self._embedding(rows, weight, as_leaf),
            name="embedding",
        )

    def _embedding(self, rows: int, weight: Weight, as_leaf: bool) -> Tensor:
        out = self.empty(rows * weight.width, weight.dtype)
        size = weight.nbytes
        out = self.link(out, (weight,), (), lambda grad, saved: (self.storage(size, "gradients"),))
        if as_leaf and out.node is None and self.grad_enabled:
            out.node = Leaf(keeps=out.storage)
        return out
