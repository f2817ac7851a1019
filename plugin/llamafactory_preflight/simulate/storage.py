"""Follows the life of every storage on the simulated card, and replays it to find the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


MIB = 1024**2
ALIGNMENT = 512  # bytes; CUDACachingAllocator rounds every request up to this (kMinBlockSize)
OWN_SEGMENT_FROM = 10 * MIB  # a request this large gets a segment of its own (kMinLargeAlloc) …
SEGMENT_MULTIPLE = 2 * MIB  # … of a multiple of this (kRoundLarge) …
LARGEST_UNSPLIT_REST = MIB  # … and the rest is cut off only if it is larger than this (kSmallSize)

Replacement = Callable[..., Any]


def counted_bytes(num_bytes: int, *, expandable_segments: bool) -> int:
    """Returns what the caching allocator counts for a request, as `memory_allocated` reports it.

    Without expandable segments a large block includes the rest of its segment that was too small to cut off. A request
    may also meet a cached block of another size; that is not followed, and costs up to 0.2 % of a peak.
    """
    size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    rest = -size % SEGMENT_MULTIPLE
    if expandable_segments or size < OWN_SEGMENT_FROM or rest > LARGEST_UNSPLIT_REST:
        return size
    return size + rest


@dataclass(slots=True)
class Block:
    """One storage on the card: what it is can become known after it was allocated (a gradient, say)."""

    num_bytes: int
    component: str
    operator: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The fullest moment of one stretch of the run, with bytes by component."""

    num_bytes: int
    components: Mapping[str, int]


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of living storages on `device`, stretch by stretch.

    Events are only logged while the run goes on; `peaks` replays them afterwards. A block may thus be filed under the
    component that it turns out to belong to, and finding the live set of a peak costs nothing per operator.

    Args:
        device_type: Storages elsewhere are ignored.
        vocab_size: Tensors whose last dimension is this are filed as logits.
        replacements: Operators whose CUDA kernel allocates scratch that no fake kernel shows, and a function that
            allocates it and returns the operator's result, or NotImplemented to let the operator run.
        expandable_segments: See `counted_bytes`; may change during the run.
    """

    def __init__(
        self,
        *,
        device_type: str = "cuda",
        vocab_size: int | None = None,
        replacements: Mapping[Any, Replacement] | None = None,
        expandable_segments: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.stretches: list[tuple[int, str]] = [(0, "")]
        self._events: list[int] = []  # block index when born, its bitwise complement when freed
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._device_type = device_type
        self._vocab_size = vocab_size
        self._replacements = replacements or {}
        self._component = "activations"
        self.expandable_segments = expandable_segments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._replacements.get(func)
        if replacement is not None:
            with self:  # its own allocations count as well
                result = replacement(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self._follow(leaf, func)
        return result

    def _follow(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._living:
            return
        index = len(self.blocks)
        num_bytes = counted_bytes(storage.nbytes(), expandable_segments=self.expandable_segments)
        component = self._component
        if component == "activations" and tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size:
            component = "logits"
        self.blocks.append(Block(num_bytes, component, str(func), tuple(tensor.shape)))
        self._events.append(index)

        def freed(_: Any, key: int = key, index: int = index) -> None:
            self._events.append(~index)
            self._living.pop(key, None)

        self._living[key] = (index, weakref.ref(storage, freed))

    def stretch(self, name: str) -> None:
        """Starts a new stretch of the run; stretches of equal name are one."""
        if self.stretches[-1][1] != name:
            self.stretches.append((len(self._events), name))

    def allocating(self, component: str) -> None:
        """Files what is allocated from now on under `component`."""
        self._component = component

    def belongs(self, tensors: Iterable[torch.Tensor], component: str) -> None:
        """Files the storages of `tensors` under `component`, back to their birth."""
        for tensor in tensors:
            entry = self._living.get(id(tensor.untyped_storage()))
            if entry is not None:
                self.blocks[entry[0]].component = component

    def number(self, tensor: torch.Tensor) -> int:
        """The block that a living tensor lies in."""
        return self._living[id(tensor.untyped_storage())][0]

    def position(self) -> int:
        """How many events there are so far."""
        return len(self._events)

    def events(self, start: int, end: int) -> list[int]:
        """A part of the log: the number of a block when it was born, and its bitwise complement when freed."""
        return self._events[start:end]

    def born(self, block: Block) -> int:
        """Logs a block that no tensor stands for, and returns its number."""
        self.blocks.append(block)
        self._events.append(len(self.blocks) - 1)
        return self._events[-1]

    def died(self, number: int) -> None:
        """Logs the end of a block that `born` made or `adopt` took over."""
        self._events.append(~number)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Leaves the end of a tensor's block to `died`, whatever Python still holds, and returns its number."""
        return self._living.pop(id(tensor.untyped_storage()))[0]

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Forgets at the end what was logged since."""
        num_events, num_blocks = len(self._events), len(self.blocks)
        try:
            yield
        finally:
            self._living = {key: entry for key, entry in self._living.items() if entry[0] < num_blocks}
            del self._events[num_events:], self.blocks[num_blocks:]

    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.blocks[index].num_bytes for index, _ in self._living.values())

    def peaks(self) -> dict[str, Peak]:
        """Replays the log and returns the peak of every stretch."""
        found: dict[str, Peak] = {}
        for name, (num_bytes, position) in self._fullest_moments().items():
            components: dict[str, int] = {}
            for index in self.alive_at(position):
                block = self.blocks[index]
                components[block.component] = components.get(block.component, 0) + block.num_bytes
            found[name] = Peak(num_bytes=num_bytes, components=components)
        return found

    def _fullest_moments(self) -> dict[str, tuple[int, int]]:
        """For every stretch: the most bytes alive in it, and after how many events that was."""
        best: dict[str, tuple[int, int]] = {}
        total = position = 0
        ends = [start for start, _ in self.stretches[1:]] + [len(self._events)]
        for (_, name), end in zip(self.stretches, ends, strict=True):
            best[name] = max(best.get(name, (-1, 0)), (total, position), key=lambda moment: moment[0])
            for event in self._events[position:end]:
                position += 1
                total += self.blocks[event].num_bytes if event >= 0 else -self.blocks[~event].num_bytes
                if total > best[name][0]:
                    best[name] = (total, position)
        return best

    def alive_at(self, position: int) -> list[int]:
        """Returns the indices of the blocks alive after `position` events."""
        alive: set[int] = set()
        for event in self._events[:position]:
            alive.add(event) if event >= 0 else alive.discard(~event)
        return sorted(alive)
