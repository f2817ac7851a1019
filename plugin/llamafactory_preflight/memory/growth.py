"""What a part of a forward pass leaves behind, booked once more for each part alike that is not run."""

from __future__ import annotations

from llamafactory_preflight.memory.dtypes import INT8
from llamafactory_preflight.memory.ops import Ops
from llamafactory_preflight.memory.paper import Storage


class Growth:
    """What has come to live since this was made; copies of weights in autocast's cache are told from the rest."""

    __slots__ = ("before", "cached_before", "ops")

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.before, self.cached_before = ops.ledger.parts.copy(), _cached_bytes(ops)

    def per_part(self) -> tuple[dict[str, int], int]:
        """Bytes that have grown by component, and in the cache."""
        grown = {name: size - self.before[name] for name, size in self.ops.ledger.parts.items()}
        cached = _cached_bytes(self.ops) - self.cached_before
        grown["buffers"] -= cached
        return {name: size for name, size in grown.items() if size > 0}, cached


def book(ops: Ops, grown: tuple[dict[str, int], int], times: int) -> tuple[list[Storage], list[Storage]]:
    """Books what has grown `times` more: what is alive, and what is in the cache until autocast ends."""
    parts, cached = grown
    in_cache = []
    if cached and ops.autocast_cache is not None:
        block = ops.empty(cached * times, INT8, "buffers")
        ops.autocast_cache[block] = block
        in_cache.append(block.storage)
    return [Storage(ops.ledger, size * times, name) for name, size in parts.items()], in_cache


def _cached_bytes(ops: Ops) -> int:
    return sum(x.storage.size for x in (ops.autocast_cache or {}).values())
