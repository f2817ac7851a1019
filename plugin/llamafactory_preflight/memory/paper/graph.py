"""Autograd's graph on paper: tensors come into it where a gradient is wanted, and module hooks run around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Ledger, Node, Storage, Tensor
from llamafactory_preflight.memory.paper.module_hooks import PEFT_MODEL, Key, Modules


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


class Held(Storage):
    """A view of a gathered weight: it takes nothing itself, and keeps the weight gathered while it lives."""

    __slots__ = ("key", "modules")

    def __init__(self, ledger: Ledger, modules: Modules, key: Key) -> None:
        self.ledger, self.size, self.component, self.viewed = ledger, 0, "weights", True  # nothing to book
        self.modules, self.key = modules, key
        modules.hold(key)

    def __del__(self) -> None:
        self.modules.let_go(self.key)


class Graph:
    """What operations share: the ledger, the grad mode, the autocast cache, and the hooks of modules.

    Args:
        ledger: Books every byte.
        autocast_dtype: The autocast type, or None when the loop runs without autocast (`pure_bf16`).

    Attributes:
        modules: The hooks on all modules, where there are some.
        own_linear: Whether DeepSpeed's function stands for F.linear: it saves parameters, and no views of them.
    """

    def __init__(self, ledger: Ledger, *, autocast_dtype: int | None) -> None:
        self.ledger = ledger
        self.autocast_dtype = autocast_dtype
        self.autocast_cache: dict[Tensor, Tensor] | None = None
        self.grad_enabled = True
        self.saved_hook: Callable[[Node], None] | None = None
        self.modules: Modules | None = None
        self.own_linear = False
        self._remaining: dict[tuple[str, Key], int] = {}
        self._clock = 0

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
        parents = tuple([x.node for x in inputs])
        if self.grad_enabled and parents.count(None) < len(parents):
            self._clock += 1
            out.node = Node(self._clock, parents, saved, backward)
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
        self._remaining[name, key] = int(self.grad_enabled and x.node is not None)
        out = run(self.hooked(x, partial(self._leave_backward, modules, name, key)))
        modules.leave(name, key)
        if name == PEFT_MODEL:  # answers for the model it wraps, whose hook takes the place of its own
            return self.hooked(out, modules.enter_container)
        return self.hooked(out, partial(modules.enter, name, key))

    def _leave_backward(self, modules: Modules, name: str, key: Key) -> None:
        """The hook behind a module's backward counts the gradients still to come since its last forward.

        Where that one had none to come, as a reference's, it miscounts, and the module is not left.
        """
        self._remaining[name, key] -= 1
        if not self._remaining[name, key]:
            modules.leave(name, key)

    def hooked(self, x: Tensor, hook: Callable[[], None]) -> Tensor:
        """The same tensor behind a function whose backward runs a hook."""
        if not self.grad_enabled or x.node is None:
            return x.detach()

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            hook()
            return (grad,)

        return self.link(x.detach(), (x,), (), backward)

    def begin_forward(self) -> None:
        """The whole model begins its forward."""
        if self.modules is not None:
            self.modules.begin_forward()

    def begin_container(self) -> None:
        """A module without a weight of its own begins its forward."""
        if self.modules is not None:
            self.modules.enter_container()

    def end_container(self, x: Tensor) -> Tensor:
        """It ends with this output, whose gradient meets the module's hook."""
        return x if self.modules is None else self.hooked(x, self.modules.enter_container)

    def view(self, weight: Weight) -> Storage:
        """What a function keeps that saves a view of a weight, as torch's own linear does (`weight.t()`)."""
        if self.modules is None or weight.key is None or not self.grad_enabled:
            return weight.storage
        return Held(self.ledger, self.modules, weight.key)

    def borrow(self, weight: Weight) -> None:
        """Reads a weight outside of its own module."""
        if self.modules is not None and weight.key is not None:
            self.modules.borrow(weight.key)
