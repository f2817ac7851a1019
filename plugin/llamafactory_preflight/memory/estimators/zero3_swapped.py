"""DeepSpeed's ZeRO-3 on paper where it offloads to an NVMe: buffers of parameters, gradients on their way to disk.

Source: deepspeed 0.18.4, runtime/zero/{partitioned_param_coordinator,partition_parameters,stage3}.py and
runtime/swap_tensor/{partitioned_param_swapper,optimizer_utils}.py. No GPU measured this: bounds are wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import host
from llamafactory_preflight.memory.estimators.sharded import Gradients, ShardedEstimator
from llamafactory_preflight.memory.paper.ledger import Ledger, Mark, Storage
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero.offload import WIDE
from llamafactory_preflight.memory.zero.stage3 import Coordinator, Gathered, partition
from llamafactory_preflight.memory.zero.stage3_gradients import NORM_BYTES, NORM_CHUNK, ShardedGradients
from llamafactory_preflight.memory.zero.swapped import Swapping
from llamafactory_preflight.phrases import phrase


class SwappingCoordinator(Coordinator):
    """Gathers parameters that lie on an NVMe: each needs a buffer from when it is read until it is let go.

    Attributes:
        needed: Buffers of all that was gathered at once.
    """

    def __init__(self, ledger: Ledger, swapping: Swapping) -> None:
        super().__init__(ledger, swapping.everything, swapping.plan, world=swapping.world, item=swapping.item)
        self.swapped = {self.states[key] for key in swapping.swapped_parameters()}
        self.buffered: set[Gathered] = set()
        self.needed = 0

    def release_all(self) -> None:
        """Before the optimizer's step: what is gathered goes, what was only read stays in its buffer."""
        self.buffered -= {state for state in self.buffered if state.available or state.handle is not None}
        super().release_all()

    def _is_at_hand(self, state: Gathered) -> bool:
        return state not in self.swapped or state in self.buffered or self._is_gathered(state)

    def _prefetch(self, members: Sequence[Gathered]) -> None:
        super()._prefetch(members)
        if self.plan.prefetch_bucket_size:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """__prefetch_nvme_param_partitions: what comes after that which is being gathered, as far as buffers go."""
        in_flight = sum(state.numel for state in self.states.values() if state.handle is not None)
        room, considered = self.plan.swap.param_buffers - len(self.buffered), 0
        for state, _ in self.queue:
            if considered > 2 * in_flight or room <= 0:
                break
            if not self._is_at_hand(state):
                self.buffered.add(state)
                room -= 1
            considered += state.numel

    def _gather(self, states: Sequence[Gathered]) -> None:
        super()._gather(states)
        gathered = {state for state in self.swapped if not state.persists and self._is_gathered(state)}
        self.buffered |= self.swapped.intersection(states)
        self.needed = max(self.needed, len(gathered.union(states) & self.swapped))
        self.buffered -= {state for state in states if state.persists}

    def _release(self, state: Gathered) -> None:
        super()._release(state)
        self.buffered.discard(state)

    def _is_gathered(self, state: Gathered) -> bool:
        return state.available or state.handle is not None


class SwappedGradients(ShardedGradients):
    """Gradients whose float32 copies go to an NVMe: those of a bucket together, and small ones only with the step."""

    def __init__(self, ledger: Ledger, swapping: Swapping) -> None:
        super().__init__(ledger, swapping.groups, swapping.plan, world=swapping.world, item=swapping.item)
        self.swap = swapping.plan.swap
        self.swapped = {parameter.key for tile in swapping.swapped_tiles() for parameter in tile}
        self.wide: list[tuple[int, Storage]] = []

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue; nothing else is made until the step takes what stays."""
        super().end_backward()
        self.wide = []

    def _reduce(self) -> None:
        super()._reduce()
        self.wide = [(size, copy) for size, copy in self.wide if self._stays(size)]

    def _keep(self, parameter: Parameter) -> None:
        if not (self.boundary and parameter.key in self.swapped):
            super()._keep(parameter)
            return
        numel = partition(parameter, self.world)
        copy = self._storage(numel * self.item, "gradients")
        norm = self._storage(min(numel, NORM_CHUNK) * NORM_BYTES, "buffers")
        del norm
        self.wide.append((numel * WIDE, self._storage(numel * WIDE, "gradients")))
        del copy

    def _stays(self, size: int) -> bool:
        """Whether some of a gradient is not written: a small one, or what exceeds a multiple of the alignment."""
        return not self.swap.swaps(size) or size % self.swap.aligned_bytes != 0


class SwappedShards(ShardedEstimator):
    """An estimate under way, for a run under ZeRO-3 that offloads to an NVMe."""

    @cached_property
    def swapping(self) -> Swapping:
        """What a rank swaps."""
        return Swapping(
            everything=self.everything, groups=self.trained, plan=self.plan, world=self.ranks.world, item=self.item
        )

    @property
    def measured(self) -> bool:
        """Not on a GPU."""
        return False

    def remarks(self) -> Iterator[str]:
        """What else is to be said."""
        yield from super().remarks()
        yield "Offloading to NVMe was measured in main memory and on disk, not on a GPU: the bounds are wide."

    def host(self, split: Mapping[str, int]) -> host.HostNeed:
        """As for any run under DeepSpeed, once it is certain that there are enough buffers."""
        count, needed = self.plan.swap.optimizer_buffers, self.swapping.buffers_needed()
        if count < needed:
            raise Unmodelled(
                phrase(
                    "DeepSpeed fails with {count} buffers for what it steps on an NVMe: set `buffer_count` in "
                    "`offload_optimizer` to {needed}",
                    count=count,
                    needed=needed,
                )
            )
        if self.swapping.fast_init_fails:
            raise Unmodelled(
                phrase(
                    "DeepSpeed fails with `fast_init` where a tile of the optimizer is larger than a buffer for "
                    "parameters: set `buffer_size` in `offload_param` to {numel} or more, or a smaller "
                    "`sub_group_size`",
                    numel=self.swapping.optimizer_buffer // WIDE,
                )
            )
        return super().host(split)

    def _step(self, rank: int) -> tuple[Mark, Mark]:
        """As for any run under stage 3, as far as there are buffers for what is gathered at once."""
        found = super()._step(rank)
        count, needed = self.plan.swap.param_buffers, self._coordinator.needed
        if count < needed:
            raise Unmodelled(
                phrase(
                    "DeepSpeed fails with {count} buffers for parameters on an NVMe where {needed} are gathered at "
                    "once: set `stage3_max_reuse_distance` to 0, or a larger `buffer_count` in `offload_param`",
                    count=count,
                    needed=needed,
                )
            )
        return found

    def _gradients(self, ledger: Ledger, rank: int) -> tuple[Gradients, Coordinator | None]:
        self._coordinator = SwappingCoordinator(ledger, self.swapping)
        return SwappedGradients(ledger, self.swapping), self._coordinator
