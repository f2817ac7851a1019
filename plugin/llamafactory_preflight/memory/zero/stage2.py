"""DeepSpeed's ZeRO-1 and ZeRO-2 on paper: what happens to each gradient as it comes, and the step on a partition.

Source: deepspeed 0.18.4, runtime/zero/stage_1_and_2.py. A gradient that comes is copied into a bucket; a full one is
reduced, and what belongs to this rank's partition is kept (on the card, or in main memory where that is offloaded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.parallel.zero import ZeroPlan


ALIGNMENT = 2
"""Elements; a flat group is padded to a multiple of it and the number of ranks."""
OVERFLOW_BYTES = 11
"""An element: a float32 copy, three masks and a second float32 copy (_has_inf_or_nan); nothing from 0.19.6 on."""
NORM_BYTES = 8
"""Gradient norms are taken in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A parameter's part in the partition of one rank: elements, and how many ranks share it."""

    parameter: Parameter
    mine: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatGroup:
    """One of the optimizer's groups in a flat tensor, of which each rank owns `partition` elements."""

    numel: int
    partition: int
    shares: tuple[Share, ...]


def flat_group(group: Sequence[Parameter], *, world: int, rank: int, round_robin: bool) -> FlatGroup:
    """Lays a group out flat, dealt out to the ranks in turn if asked for, and cuts it into equal parts."""
    ordered = [item for first in range(world) for item in group[first::world]] if round_robin else list(group)
    unit = ALIGNMENT * world
    numel = -(-sum(item.numel for item in ordered) // unit) * unit
    partition = numel // world
    shares, start = {}, 0
    for item in ordered:
        end = start + item.numel
        mine = max(0, min(end, (rank + 1) * partition) - max(start, rank * partition))
        ranks = tuple(range(start // partition, (end - 1) // partition + 1))
        shares[item.key] = Share(parameter=item, mine=mine, ranks=ranks)
        start = end
    return FlatGroup(numel=numel, partition=partition, shares=tuple(shares[item.key] for item in group))


class PartitionedGradients:
    """The gradients of a rank under stage 1 or 2.

    Args:
        ledger: Books every byte.
        groups: What is trained.
        plan: DeepSpeed's settings.
        item: Bytes of an element of the model.
        rank: Whose partition is followed.
        overflow_bytes: Bytes an element that looking for overflow takes; done where gradients are offloaded.
    """

    def __init__(
        self, ledger: Ledger, groups: Sequence[FlatGroup], plan: ZeroPlan, *, item: int, rank: int, overflow_bytes: int
    ) -> None:
        self.ledger, self.groups, self.plan, self.item, self.rank = ledger, groups, plan, item, rank
        self.shares = {share.parameter.key: share for group in groups for share in group.shares}
        self.offloads, self.overflow_bytes = plan.offload_optimizer != "none", overflow_bytes
        self.boundary = True
        self.buckets: list[Storage] = []
        self.elements = 0
        self.pending: list[tuple[Share, Storage | None]] = []
        self.gathered: dict[Key, Storage] = {}
        self.mine: Storage | None = None
        self.kept: list[Storage] = []
        self.accumulated: list[Storage] = []

    def gradient(self, key: Key) -> Storage | None:
        """What a parameter has accumulated: stage 1 reduces at the end of a step only."""
        return self.gathered.get(key)

    def receive(self, key: Key, leaf: Leaf) -> None:
        """The hook behind a parameter's gradient; the engine holds the gradient until it returns."""
        if not self.buckets and self.plan.contiguous_gradients:
            size = self.plan.reduce_bucket_size * self.item
            self.buckets = [self._storage(size) for _ in range(2 if self.plan.overlap_comm else 1)]
        arrived = leaf.grad
        assert arrived is not None
        if self.plan.stage == 1 and not (self.plan.overlap_comm and self.boundary):
            self.gathered[key] = arrived
            return
        leaf.grad = None
        self.gathered.pop(key, None)
        self._add(self.shares[key], arrived)

    def _add(self, share: Share, grad: Storage) -> None:
        numel = share.parameter.numel
        if self.elements + numel > self.plan.reduce_bucket_size:
            self._reduce()
        copied = self.plan.contiguous_gradients and numel <= self.plan.reduce_bucket_size
        self.pending.append((share, None if copied else grad))
        self.elements += numel

    def _reduce(self) -> None:
        """average_tensor and what follows: a bucket whose slices go to several ranks is written out once more."""
        together = not self.plan.contiguous_gradients or (self.plan.reduce_scatter and self._slices() > 1)
        if together:
            flat = self._storage(self.elements * self.item)
            del flat
        pending, self.pending, self.elements = self.pending, [], 0
        for share, own in pending:
            if not share.mine:
                continue
            if self.offloads:
                self._offload(share)
            elif self.plan.contiguous_gradients:
                self._copy_into_partition()
            elif own is not None:
                self.kept.append(own)
        del pending

    def _slices(self) -> int:
        """Runs of one rank in the bucket."""
        ranks = [rank for share, _ in self.pending for rank in share.ranks]
        return 1 + sum(one != other for one, other in pairwise(ranks))

    def _copy_into_partition(self) -> None:
        if self.mine is None:
            total = sum(share.parameter.numel for share in self.shares.values() if share.mine)
            self.mine = self._storage(total * self.item)

    def _offload(self, share: Share) -> None:
        """What a gradient goes through on its way to main memory, at the last micro-step."""
        if not self.boundary:
            return
        for size in (
            share.mine * NORM_BYTES,
            share.parameter.numel * self.overflow_bytes,
            share.mine * dtypes.size(FLOAT32),
        ):
            scratch = self._storage(size, "buffers")
            del scratch

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue, after each micro-step; stage 1 reduces here."""
        if self.plan.stage == 1:
            if not self.boundary:
                return
            for key in [share.parameter.key for group in self.groups for share in group.shares]:
                if key in self.gathered:
                    self._add(self.shares[key], self.gathered.pop(key))
        self._reduce()
        new = [*self.kept, *([self.mine] if self.mine is not None else [])]
        self.accumulated = self.accumulated or new
        self.kept, self.mine, self.buckets = [], None, []

    def step(self, optimizer: Callable[[Sequence[int]], OptimizerMemory]) -> None:
        """Norm, float32 gradients of the partition, and the optimizer, one group after the other."""
        if self.offloads:
            return
        largest = max((share.mine for share in self.shares.values()), default=0)
        norm = self._storage(largest * NORM_BYTES, "buffers")
        del norm
        for number, group in enumerate(self.groups):
            flat = self._storage(group.partition * self.item)
            high = self._storage(group.partition * dtypes.size(FLOAT32))
            del flat
            if number == len(self.groups) - 1:
                self.accumulated = []
            scratch = self._storage(optimizer([group.partition]).step, "buffers")
            del scratch, high

    def _storage(self, size: int, component: str = "gradients") -> Storage:
        return Storage(self.ledger, size, component)
