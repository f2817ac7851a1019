"""PyTorch on paper: tensors with a size and a lifetime, and an autograd engine that frees them when PyTorch would.

CPython's reference counts decide how long a real tensor lives, so they decide it here too: a `Storage` books its bytes
when it is made and gives them back when its last reference goes. Code written against this module keeps the references
that the real code keeps, and the ledger's highest mark is then the allocated peak.

Source: torch/csrc/autograd (engine.cpp, input_buffer.cpp, accumulate_grad.h) and c10/cuda/CUDACachingAllocator.cpp.
Known error: a reused block below 10 MiB may count up to 1 MiB more than was asked for; not modelled.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable

from llamafactory_preflight.memory.paper import dtypes


COMPONENTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")
ALLOCATION_UNIT = 512
LARGE_ALLOCATION = 10 * 2**20
SEGMENT_UNIT = 2 * 2**20
UNSPLIT_REST = 2**20
LEAF_ORDER = 1 << 60
Mark = tuple[int, dict[str, int]]
"""The bytes of a peak, and their split by component."""
Booking = tuple[str, int]
"""A component and the bytes that it gets, or gives back where they are below zero."""


class Ledger:
    """Live bytes, and the highest mark with its split by component.

    Args:
        expandable_segments: Whether the allocator runs with them; without, a large block comes in segments of 2 MiB
            and keeps a remainder of up to 1 MiB, which counts as allocated.

    Attributes:
        bookings: What is booked from now on, or None where nobody wants to know.
    """

    __slots__ = ("at_peak", "bookings", "expandable_segments", "live", "parts", "peak")

    def __init__(self, *, expandable_segments: bool) -> None:
        self.expandable_segments = expandable_segments
        self.bookings: list[Booking] | None = None
        self.live = self.peak = 0
        self.parts = dict.fromkeys(COMPONENTS, 0)
        self.at_peak = self.parts.copy()

    def block(self, size: int) -> int:
        """The bytes that count for a request of `size`."""
        size = -(-size // ALLOCATION_UNIT) * ALLOCATION_UNIT
        if not self.expandable_segments and size >= LARGE_ALLOCATION:
            rest = -size % SEGMENT_UNIT
            return size + rest if rest <= UNSPLIT_REST else size
        return size

    def take_peak(self) -> Mark:
        """Returns the highest mark and its split since the last call, and starts anew from what is live."""
        mark, split = self.peak, self.at_peak
        self.peak, self.at_peak = self.live, self.parts.copy()
        return mark, split

    def book(self, bookings: Iterable[Booking]) -> None:
        """Books again what a list holds, in its order."""
        for component, size in bookings:
            self.parts[component] += size
            self.live += size
            if self.live > self.peak:
                self.peak, self.at_peak = self.live, self.parts.copy()


def mark_bytes(mark: Mark) -> int:
    """By which peaks are compared."""
    return mark[0]


class Storage:
    """Bytes that are allocated for as long as somebody refers to them.

    Attributes:
        viewed: The tensor is a view (`ViewBackward` returns one), whose base is a second owner: nothing is added to it
            in place.
    """

    __slots__ = ("component", "ledger", "size", "viewed")

    def __init__(self, ledger: Ledger, size: int, component: str, *, viewed: bool = False) -> None:
        self.size = size = ledger.block(size)
        self.ledger, self.component, self.viewed = ledger, component, viewed
        ledger.parts[component] += size
        ledger.live += size
        if ledger.live > ledger.peak:
            ledger.peak, ledger.at_peak = ledger.live, ledger.parts.copy()
        if ledger.bookings is not None:
            ledger.bookings.append((component, size))

    def __del__(self) -> None:
        ledger = self.ledger
        ledger.live -= self.size
        ledger.parts[self.component] -= self.size
        if ledger.bookings is not None:
            ledger.bookings.append((self.component, -self.size))


class Tensor:
    """A number of elements in a storage; `node` is its autograd function, or None where no gradient flows."""

    __slots__ = ("dtype", "node", "numel", "storage")

    def __init__(self, numel: int, dtype: int, storage: Storage, node: Node | None = None) -> None:
        self.numel, self.dtype, self.storage, self.node = numel, dtype, storage, node

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * dtypes.size(self.dtype)

    def detach(self) -> Tensor:
        """The same storage, outside of the graph."""
        return Tensor(self.numel, self.dtype, self.storage)


Gradients = Iterable["Storage | None"]
Backward = Callable[["Storage", "tuple[Storage, ...]"], Gradients]


class Node:
    """A function in the autograd graph: what it saved, where its gradients go, and how it makes them."""

    __slots__ = ("__weakref__", "backward", "order", "parents", "recompute", "saved")

    def __init__(
        self, order: int, parents: tuple[Node | None, ...], saved: tuple[Storage, ...], backward: Backward | None
    ) -> None:
        self.order, self.parents, self.saved, self.backward = order, parents, saved, backward
        self.recompute: Callable[[], None] | None = None

    def run(self, grad: Storage) -> tuple[Storage | None, ...]:
        """Makes the gradients for the parents and frees what was saved; first makes it again if it was dropped."""
        assert self.backward is not None
        if self.recompute is not None:
            self.recompute()
            self.recompute = None  # and with it the input that it would run again on
        gradients = tuple(self.backward(grad, self.saved))
        self.saved = ()
        return gradients


class Leaf(Node):
    """The end of the graph at a parameter (or a detached activation): keeps the gradient as AccumulateGrad does.

    Attributes:
        keeps: The leaf itself, which AccumulateGrad owns for as long as the graph lives.
        receive: The hook that runs behind the gradient (register_post_accumulate_grad_hook), if there is one.
    """

    __slots__ = ("grad", "keeps", "receive")

    def __init__(
        self,
        grad: Storage | None = None,
        *,
        keeps: Storage | None = None,
        receive: Callable[[Leaf], None] | None = None,
    ) -> None:
        super().__init__(LEAF_ORDER, (), (), None)
        self.grad, self.keeps, self.receive = grad, keeps, receive

    def run(self, grad: Storage) -> tuple[Storage | None, ...]:
        """Keeps the gradient."""
        if self.grad is None:  # a fresh gradient is taken over; an existing one is added to in place
            self.grad = grad
        if self.receive is not None:
            self.receive(self)
        return ()


def run_backward(root: Node, grad: Storage) -> None:
    """Runs the graph from `root`, newest function first, freeing what each one saved once it ran.

    The caller's own reference to `grad` counts, as it does in PyTorch: while it lasts the buffer is not reused.
    """
    waiting = _count_dependencies(root)
    buffer: dict[Node, Storage] = {root: grad}
    del grad
    ready = [(-root.order, 0, root)]
    pushed = 0
    while ready:
        node = heapq.heappop(ready)[2]
        gradients = node.run(buffer.pop(node))
        for parent, gradient in zip(node.parents, gradients, strict=False):
            if parent is None:
                continue
            if gradient is not None:
                _add_to_buffer(buffer, parent, gradient)
            waiting[parent] -= 1
            if not waiting[parent] and parent in buffer:
                pushed += 1
                heapq.heappush(ready, (-parent.order, pushed, parent))
        gradients = gradient = parent = None  # type: ignore[assignment]


def _count_dependencies(root: Node) -> dict[Node, int]:
    counts: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for parent in stack.pop().parents:
            if parent is None:
                continue
            if parent in counts:
                counts[parent] += 1
            else:
                counts[parent] = 1
                stack.append(parent)
    return counts


def _add_to_buffer(buffer: dict[Node, Storage], node: Node, gradient: Storage) -> None:
    old = buffer.get(node)
    if old is None:
        buffer[node] = gradient
    elif (
        old.viewed or sys.getrefcount(old) > 3
    ):  # the buffer, this name and the call: anybody else makes the sum a new tensor
        buffer[node] = Storage(old.ledger, old.size, old.component)
