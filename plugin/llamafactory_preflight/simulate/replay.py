"""Functions that loop in Python over chunks of a sequence: simulated once, and repeated from the log after that.

The gated delta rule's fallback in transformers takes thousands of operators, in every layer and every pass. What they
allocate follows from the layout of its inputs alone. So it is run aside, forward and backward, on tensors made for
that, and wherever the model calls it, the log of that run is written once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from llamafactory_preflight.simulate.card import CARD
from llamafactory_preflight.simulate.storage import Block, StorageTracker


LOOPS = ("chunk_gated_delta_rule",)  # attributes of modules, and only while they are functions named `torch_…`


@dataclass(frozen=True, slots=True)
class Layout:
    """What a tensor looks like, and in which block of a recording it lies."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int
    block: int

    @classmethod
    def of(cls, tensor: torch.Tensor | None, tracker: StorageTracker) -> Layout | None:
        """Describes a tensor that `tracker` follows, if there is one."""
        if tensor is None:
            return None
        num_bytes = tensor.untyped_storage().nbytes()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, num_bytes, tracker.number(tensor))

    def empty(self) -> torch.Tensor:
        """Allocates a tensor like this one."""
        flat = torch.empty(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=CARD)
        return flat.as_strided(self.size, self.stride)


@dataclass(slots=True)
class Recording:
    """The log of one call, in the numbers that its blocks had then, and of the call's backward pass."""

    forward: Sequence[int] = ()
    backward: Sequence[int] = ()
    blocks: Sequence[Block] = ()
    first_block: int = 0
    inputs: Sequence[Layout | None] = ()
    outputs: Sequence[Layout | None] = ()
    gradients: Sequence[Layout | None] = ()  # of the inputs
    arriving: Layout | None = None  # the gradient of the output
    structure: Any = None  # of the outputs


Recordings = dict[Any, Recording]


@contextmanager
def loops_replayed(model: nn.Module, tracker: StorageTracker, recordings: Recordings) -> Iterator[None]:
    """Records and replays the loops of a model's modules.

    Args:
        model: The model.
        tracker: Follows what is allocated.
        recordings: What is known already; what is recorded is added.
    """
    replaced: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name in LOOPS:
            function: Any = getattr(module, name, None)
            if getattr(function, "__name__", "").startswith("torch_"):
                replaced.append((module, name, function))
                setattr(module, name, _Replayed(function, tracker, recordings))
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


class _Replayed:
    """Stands in for a function of tensors."""

    def __init__(self, function: Callable[..., Any], tracker: StorageTracker, recordings: Recordings) -> None:
        self._function = function
        self._tracker = tracker
        self._recordings = recordings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return self._function(*args, **kwargs)  # a checkpoint that is not reentrant counts what is saved
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (self._function, structure, tuple(map(_described, leaves)), with_graph, autocast)
        recording = self._recordings.get(key)
        if recording is None:
            with self._tracker.taken_back():
                recording = _record(self._function, leaves, structure, self._tracker, with_graph=with_graph)
            self._recordings[key] = recording
        call = _Call(recording, self._tracker)
        if with_graph:
            outputs = _Replay.apply(call, *tensors)  # type: ignore[no-untyped-call]
        else:
            outputs = call.forward()
        return tree_unflatten(list(outputs), recording.structure)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _record(
    function: Callable[..., Any], leaves: Sequence[Any], structure: Any, tracker: StorageTracker, *, with_graph: bool
) -> Recording:
    """Runs a function on tensors like those given, and its backward pass."""
    recording = Recording(first_block=len(tracker.blocks))
    likes = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]
    recording.inputs = [Layout.of(tensor, tracker) for tensor in likes]
    if with_graph:
        anchor = torch.empty((), device=CARD, requires_grad=True)
        likes = list(_Entrance.apply(recording, tracker, anchor, *likes))  # type: ignore[no-untyped-call]
    tensors = iter(likes)
    given = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(given, structure)
    start = tracker.position()
    outputs, recording.structure = tree_flatten(function(*args, **kwargs))
    recording.forward = tracker.events(start, tracker.position())
    recording.outputs = [Layout.of(output, tracker) for output in outputs]
    end = _Exit.apply(recording, tracker, *outputs) if with_graph else None  # type: ignore[no-untyped-call]
    del likes, tensors, given, args, kwargs, outputs  # as they go in the model, unless the graph holds them
    if end is not None:
        start = tracker.position()
        with torch.autocast("cuda", enabled=False):  # as it is when the model's backward pass runs
            torch.autograd.backward(end)
        del end
        events = tracker.events(start, tracker.position())
        assert recording.arriving is not None
        recording.backward = events[events.index(recording.arriving.block) + 1 :]
    recording.blocks = tracker.blocks[recording.first_block :]
    return recording


class _Entrance(torch.autograd.Function):
    """Hands tensors on, and notes the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, tracker: StorageTracker, anchor: Any, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.notes = recording, tracker
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recording, tracker = ctx.notes
        recording.gradients = [Layout.of(gradient, tracker) for gradient in gradients]
        return (None, None, None, *(None for _ in gradients))


class _Exit(torch.autograd.Function):
    """Ends a function whose first output gets a gradient that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, tracker: StorageTracker, output: Any, *others: Any) -> Any:
        ctx.notes = recording, tracker, Layout.of(output, tracker), len(others)
        return torch.empty((), device=CARD)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        recording, tracker, output, num_others = ctx.notes
        gradient = output.empty()
        recording.arriving = Layout.of(gradient, tracker)
        return (None, None, gradient, *(None for _ in range(num_others)))


class _Call:
    """One replayed call: the blocks of the recording that are alive, by their numbers in it."""

    def __init__(self, recording: Recording, tracker: StorageTracker) -> None:
        self._recording = recording
        self._tracker = tracker
        self._numbers: dict[int, int] = {}
        self._held: dict[int, torch.Tensor] = {}

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        """Writes the log of the forward pass and returns its outputs."""
        return self._write(self._recording.forward, self._recording.outputs)

    def hold(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> None:
        """Keeps the inputs and outputs that the graph of the recorded call held, until the recording frees them."""
        layouts = (*self._recording.inputs, *self._recording.outputs)
        freed = {~event for event in self._recording.backward}
        for layout, tensor in zip(layouts, (*inputs, *outputs), strict=True):
            if layout is not None and tensor is not None and layout.block in freed:
                self._held[layout.block] = tensor.detach()

    def backward(self, arriving: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Writes the log of the backward pass and returns the inputs' gradients."""
        assert self._recording.arriving is not None
        self._numbers[self._recording.arriving.block] = self._tracker.adopt(arriving)
        return self._write(self._recording.backward, self._recording.gradients)

    def _write(self, events: Sequence[int], results: Sequence[Layout | None]) -> tuple[torch.Tensor | None, ...]:
        layouts = {layout.block: layout for layout in results if layout is not None}
        made: dict[int, torch.Tensor] = {}
        for event in events:
            if event in layouts:
                made[event] = layouts[event].empty()
            elif event >= 0:
                block = self._recording.blocks[event - self._recording.first_block]
                self._numbers[event] = self._tracker.born(block)
            elif ~event in self._numbers:
                self._tracker.died(self._numbers.pop(~event))
            else:
                self._held.pop(~event, None)
        return tuple(None if layout is None else made[layout.block] for layout in results)


class _Replay(torch.autograd.Function):
    """A call and its backward pass, out of a recording."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        outputs = call.forward()
        call.hold(tensors, outputs)
        ctx.call = call
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        return (None, *ctx.call.backward(gradient))
