"""What a part of a forward pass leaves behind, booked once more for each part alike that is not run."""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.memory.paper.dtypes import INT8
from llamafactory_preflight.memory.paper.ledger import Ledger, Storage
from llamafactory_preflight.memory.paper.ops import Ops


class Shelf(Storage):
    """An empty storage that a function saves, on which others are put once they are known."""

    __slots__ = ("held",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, 0, "activations")
        self.held: Sequence[Storage] = ()


class Growth:
    """What has come to live since this was made."""

    __slots__ = ("before", "cached_before", "ops")

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.before, self.cached_before = ops.ledger.parts.copy(), _cached_bytes(ops)

    def book(self, times: int, *, cached_too: bool = True) -> list[Storage]:
        """Books it `times` more and returns what a graph keeps of it.

        Args:
            times: How often.
            cached_too: Whether the graph keeps the copies of weights in autocast's cache, or the cache alone does.
        """
        ops = self.ops
        grown = {name: size - self.before[name] for name, size in ops.ledger.parts.items()}
        cached = _cached_bytes(ops) - self.cached_before
        grown["buffers"] -= cached
        left = [Storage(ops.ledger, size * times, name) for name, size in grown.items() if size > 0]
        if cached and ops.autocast_cache is not None:
            block = ops.empty(cached * times, INT8, "buffers")
            ops.autocast_cache[block] = block
            if cached_too:
                left.append(block.storage)
        return left


def _cached_bytes(ops: Ops) -> int:
    return sum(x.storage.size for x in (ops.autocast_cache or {}).values())
