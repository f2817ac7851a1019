"""The operations a decoder is made of, on paper: what each allocates, saves for its backward, and allocates there.

Each one names the PyTorch function it stands for. Sizes are elements; `dtype` is bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from llamafactory_preflight.memory import dtypes
from llamafactory_preflight.memory.dtypes import FLOAT32
from llamafactory_preflight.memory.module_hooks import PEFT_MODEL, Key, Modules
from llamafactory_preflight.memory.paper import Gradients, Leaf, Ledger, Node, Storage, Tensor


class Weight(Tensor):
    """A parameter of a linear or norm layer.

    Attributes:
        width: Input features (1 for a norm's weight).
        key: Its layer and name, where ranks share it.
    """

    __slots__ = ("key", "width")

    def __init__(
        self,
        numel: int,
        dtype: int,
        storage: Storage,
        *,
        width: int = 1,
        leaf: Leaf | None = None,
        key: Key | None = None,
    ) -> None:
        super().__init__(numel, dtype, storage, leaf)
        self.width, self.key = width, key


class Ops:
    """PyTorch's functional interface on paper, with its grad mode and its autocast cache.

    Args:
        ledger: Books every byte.
        autocast_dtype: The autocast type, or None when the loop runs without autocast (`pure_bf16`).
    """

    def __init__(self, ledger: Ledger, *, autocast_dtype: int | None) -> None:
        self.ledger = ledger
        self.autocast_dtype = autocast_dtype
        self.autocast_cache: dict[Tensor, Tensor] | None = None
        self.grad_enabled = True
        self.saved_hook: Callable[[Node], None] | None = None
        self.modules: Modules | None = None
        self._clock = 0

    # graph -------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: int, component: str = "activations") -> Tensor:
        """A new tensor outside of the graph."""
        return Tensor(numel, dtype, Storage(self.ledger, numel * dtypes.size(dtype), component))

    def storage(self, size: int, component: str = "activations") -> Storage:
        """Bytes without a tensor: gradients and scratch."""
        return Storage(self.ledger, size, component)

    def link(
        self,
        out: Tensor,
        inputs: tuple[Tensor, ...],
        saved: tuple[Storage, ...],
        backward: Callable[[Storage, tuple[Storage, ...]], Gradients],
    ) -> Tensor:
        """Puts `out` into the graph if a gradient is wanted by any input."""
        if self.grad_enabled and any(x.node is not None for x in inputs):
            self._clock += 1
            out.node = Node(self._clock, tuple(x.node for x in inputs), saved, backward)
            if self.saved_hook is not None and saved:
                self.saved_hook(out.node)
        return out

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """torch.no_grad."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def enable_grad(self) -> Iterator[None]:
        """torch.enable_grad."""
        before, self.grad_enabled = self.grad_enabled, True
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """torch.autocast: the outermost exit drops the cache of cast weights."""
        if self.autocast_dtype is None or self.autocast_cache is not None:
            yield
            return
        self.autocast_cache = {}
        try:
            yield
        finally:
            self.autocast_cache = None

    def module(self, x: Tensor, weight: Weight, run: Callable[[Tensor], Tensor], *, name: str = "own") -> Tensor:
        """Runs a module of one weight with the hooks around it, which live in functions on its input and output."""
        modules, key = self.modules, weight.key
        if modules is None or key is None:
            return run(x)

        modules.enter(name, key)
        out = run(self._hooked(x, partial(modules.leave, name, key)))
        modules.leave(name, key)
        if name == PEFT_MODEL:  # answers for the model it wraps, whose hook takes the place of its own
            return self._hooked(out, modules.enter_container)
        return self._hooked(out, partial(modules.enter, name, key))

    def _hooked(self, x: Tensor, hook: Callable[[], None]) -> Tensor:
        """The same tensor behind a function whose backward runs a hook."""

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            hook()
            return (grad,)

        return self.link(x.detach(), (x,), (), backward)

    def begin_container(self) -> None:
        """A module without a weight of its own begins its forward."""
        if self.modules is not None:
            self.modules.enter_container()

    def end_container(self, x: Tensor) -> Tensor:
        """It ends with this output, whose gradient meets the module's hook."""
        return x if self.modules is None else self._hooked(x, self.modules.enter_container)

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
        if used.node is not None or self.modules is not None:  # DeepSpeed's own function saves its input always
            saved += (x.storage,)
        if x.node is not None:
            saved += (used.storage,)
        dx = x.nbytes if x.node is not None else 0
        dw = used.nbytes if used.node is not None else 0
        owner = "gradients" if used is weight else "buffers"
        viewed = self.modules is None

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

    def borrow(self, weight: Weight) -> None:
        """Reads a weight outside of its own module."""
        if self.modules is not None and weight.key is not None:
            self.modules.borrow(weight.key)
