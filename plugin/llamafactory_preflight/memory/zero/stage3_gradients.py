"""DeepSpeed's ZeRO-3 on paper: what becomes of each gradient as it comes, and the step on a partition.

Source: deepspeed 0.18.4, runtime/zero/stage3.py and runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.memory.zero.stage3 import partition
from llamafactory_preflight.parallel.zero import ZeroPlan


NORM_BYTES = 8
"""Gradient norms are taken in float64."""
NORM_CHUNK = 250_000_000
"""Elements of an offloaded gradient whose norm is taken at once (_constant_buffered_norm2)."""


class ShardedGradients:
    """The gradients of a rank under stage 3.

    Args:
        ledger: Books every byte.
        groups: What is trained, in the optimizer's groups.
        plan: DeepSpeed's settings.
        world: Ranks.
        item: Bytes of an element of the model.
    """

    def __init__(
        self, ledger: Ledger, groups: Sequence[Sequence[Parameter]], plan: ZeroPlan, *, world: int, item: int
    ) -> None:
        self.ledger, self.plan, self.world, self.item = ledger, plan, world, item
        self.trained = {parameter.key: parameter for group in groups for parameter in group}
        self.tiles = [tile for group in groups for tile in tiles(group, plan.sub_group_size, world)]
        self.offloads = plan.offload_optimizer != "none"
        self.boundary = True
        self.elements = 0
        self.pending: list[tuple[Parameter, Storage | None]] = []

    def gradient(self, key: Key) -> Storage | None:
        """Nothing: a gradient goes as soon as it is reduced."""
        return None

    def receive(self, key: Key, leaf: Leaf) -> None:
        """The hook behind a parameter's gradient; the engine holds the gradient until it returns."""
        arrived, leaf.grad = leaf.grad, None
        parameter, limit = self.trained[key], self.plan.reduce_bucket_size
        if self.elements + parameter.numel > limit and self.elements:
            self._reduce()
        copied = self.plan.contiguous_gradients and self.elements + parameter.numel <= limit
        self.pending.append((parameter, None if copied else arrived))
        self.elements += parameter.numel

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue."""
        self._reduce()

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads: all but a single gradient that divides evenly is written out once more."""
        if not self.pending:
            return
        parts = [partition(parameter, self.world) for parameter, _ in self.pending]
        alone = len(parts) == 1 and self.pending[0][0].numel % self.world == 0
        flat = None if alone else self._storage(sum(parts) * self.world * self.item, "gradients")
        self.elements = 0
        self.pending.reverse()
        while self.pending:
            parameter, own = self.pending.pop()
            self._keep(parameter)
            del own
        del flat

    def _keep(self, parameter: Parameter) -> None:
        """partition_grads: into the flat buffer; with that in main memory, by way of the card."""
        if not self.offloads:
            return
        numel = partition(parameter, self.world)
        copy = self._storage(numel * self.item, "gradients")
        if self.boundary:
            for size in (min(numel, NORM_CHUNK) * NORM_BYTES, numel * dtypes.size(FLOAT32)):
                scratch = self._storage(size, "buffers")
                del scratch
        del copy

    def step(self, optimizer: Callable[[Sequence[int]], OptimizerMemory]) -> None:
        """Norms, then float32 gradients and the optimizer for one tile after the other."""
        if self.offloads:
            return
        largest = max((partition(parameter, self.world) for parameter in self.trained.values()), default=0)
        norm = self._storage(largest * NORM_BYTES, "buffers")
        del norm
        for numel in self.tiles:
            flat = self._storage(numel * self.item, "gradients")
            high = self._storage(numel * dtypes.size(FLOAT32), "gradients")
            del flat
            scratch = self._storage(optimizer([numel]).step, "buffers")
            del scratch, high

    def _storage(self, size: int, component: str) -> Storage:
        return Storage(self.ledger, size, component)


def tiles(group: Sequence[Parameter], limit: int, world: int) -> list[int]:
    """Elements of each tile of the optimizer's step on one rank."""
    return [sum(partition(parameter, world) for parameter in tile) for tile in sub_groups(group, limit, world)]


def sub_groups(group: Sequence[Parameter], limit: int, world: int) -> list[list[Parameter]]:
    """The parameters of each tile (_create_fp16_sub_groups)."""
    found: list[list[Parameter]] = [[]]
    current = 0
    for parameter in group:
        if current >= limit:
            found.append([])
            current = 0
        found[-1].append(parameter)
        current += partition(parameter, world)
    return found if group else []
