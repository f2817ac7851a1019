"""What DeepSpeed's ZeRO-3 swaps to an NVMe: which tensors have files there, and the main memory that swapping takes.

Source: deepspeed 0.18.4, runtime/zero/{stage3,partition_parameters}.py and
runtime/swap_tensor/{partitioned_param_swapper,optimizer_utils,pipelined_optimizer_swapper}.py. All tensors go through
page-locked buffers, whatever `pin_memory` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory import parameters, sharding
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.memory.zero.offload import (
    ADAM_STATES,
    WIDE,
    HostMemory,
    Sharing,
    optimizer_host,
    parameters_host,
)
from llamafactory_preflight.memory.zero.stage3 import partition
from llamafactory_preflight.memory.zero.stage3_gradients import sub_groups
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription


OPTIMIZER_TENSORS = 1 + ADAM_STATES
"""Float32 weights and Adam's states; with a gradient a tile needs one buffer more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swapping(Sharing):
    """What one rank swaps."""

    def size(self, parameter: Parameter) -> int:
        """Bytes of this rank's part of a parameter."""
        return partition(parameter, self.world) * self.item

    def has_file(self, parameter: Parameter) -> bool:
        """Whether a parameter is written to the NVMe as it is shared out."""
        return self.plan.offload_param == "nvme" and self.plan.swap.swaps(self.size(parameter))

    def tiles(self) -> Iterator[list[Parameter]]:
        """The parameters of each tile of the optimizer's step."""
        for group in self.groups:
            yield from sub_groups(group, self.plan.sub_group_size, self.world)

    def numel(self, tile: Sequence[Parameter]) -> int:
        """Elements of this rank's part of a tile."""
        return sum(partition(parameter, self.world) for parameter in tile)

    def swapped_tiles(self) -> list[list[Parameter]]:
        """Tiles of which float32 weights and states lie on the NVMe."""
        if self.plan.offload_optimizer != "nvme":
            return []
        return [tile for tile in self.tiles() if self.plan.swap.swaps(self.numel(tile) * WIDE)]

    def buffers_needed(self) -> int:
        """Buffers of the optimizer that are taken at once from the second step on."""
        in_flight = 1 + self.plan.swap.reads_ahead + self.plan.swap.writes_behind
        return (OPTIMIZER_TENSORS + 1) * min(in_flight, len(self.swapped_tiles()))

    @property
    def fast_init_fails(self) -> bool:
        """Whether `fast_init` reads a tile from the NVMe into buffers for parameters that do not hold the largest."""
        swap, kept = self.plan.swap, self.kept_tiles()
        reads = (
            swap.fast_init and self.plan.offload_param == "nvme" and any(t not in kept for t in self.swapped_tiles())
        )
        held = swap.aligned(swap.param_buffer_size * self.item) // self.item
        return reads and held < self.optimizer_buffer // WIDE

    @property
    def optimizer_buffer(self) -> int:
        """Bytes of one of the optimizer's buffers, which holds the largest tile."""
        return self.plan.swap.aligned(max(map(self.numel, self.tiles()), default=0) * WIDE)

    @property
    def param_buffers(self) -> int:
        """Bytes of all buffers for parameters, which are one tensor."""
        return self.plan.swap.param_buffers * self.plan.swap.aligned(self.plan.swap.param_buffer_size * self.item)

    @property
    def written_back(self) -> int:
        """Bytes of a buffer for a tile's 16-bit parameters, where a step writes any to the NVMe.

        It has room for all ranks' parts of the largest tile, of which a rank uses its own.
        """
        tiles = list(self.tiles())
        if len(self.kept_tiles()) == len(tiles):
            return 0
        return sum(self.plan.swap.aligned(p.numel * self.item) for p in max(tiles, key=self.numel))

    def flats(self) -> list[int]:
        """Elements of the flat buffers of each group, for trained parameters that stay in main memory."""
        limit, found, counted = self.plan.swap.max_in_cpu, [], 0
        for group in self.groups:
            numel = self.numel(group)
            found.append(numel if counted + numel <= limit else max(0, limit - counted))
            counted += numel
        return found

    def kept_tiles(self) -> list[list[Parameter]]:
        """Tiles whose 16-bit parameters stay in main memory: those that fit their group's flat buffer, in order."""
        kept = []
        for group, flat in zip(self.groups, self.flats(), strict=True):
            end = 0
            for tile in sub_groups(group, self.plan.sub_group_size, self.world):
                end += self.numel(tile)
                kept += [tile] if end <= flat else []
        return kept

    def swapped_parameters(self) -> frozenset[Key]:
        """Parameters that are read from the NVMe whenever they are gathered."""
        kept = {parameter.key for tile in self.kept_tiles() for parameter in tile}
        return frozenset(p.key for p in self.everything if self.has_file(p) and p.key not in kept)

    def disk(self, *, tied: int) -> dict[str, int]:
        """Bytes of this rank's files; those of parameters that stay in main memory and of a tied head remain."""
        swap, wide = self.plan.swap, WIDE
        head = Parameter(key=(0, ""), numel=tied, trained=False)
        files = [p for p in (*self.everything, *([head] if tied else [])) if self.has_file(p)]
        tiles = self.swapped_tiles()
        gradients = [partition(p, self.world) * wide for tile in tiles for p in tile]
        even = [size - size % swap.aligned_bytes for size in gradients]  # the rest waits in memory
        return {
            "param": sum(swap.aligned(self.size(p)) for p in files),
            "optimizer": sum(OPTIMIZER_TENSORS * swap.aligned(self.numel(tile) * wide) for tile in tiles),
            "gradient": sum(size for size in even if swap.swaps(size)),
        }


def swapped_files(run: RunDescription, shape: ModelShape, *, world: int) -> dict[str, int]:
    """Bytes of a rank's files, by the section of the DeepSpeed JSON that says where they go."""
    plan = ZeroPlan.from_config(run.deepspeed or {}, hidden_size=shape.hidden_size)
    everything = sharding.in_order(run, shape)
    item = dtypes.size(precision(run, shape).trained)
    swapping = Swapping(everything=everything, groups=sharding.groups(everything), plan=plan, world=world, item=item)
    size = swapping.disk(tied=parameters.embedding_numel(shape) if shape.tie_word_embeddings else 0)
    return {"offload_param": size["param"], "offload_optimizer": size["optimizer"] + size["gradient"]}


def swapped_host(swapping: Swapping) -> HostMemory:
    """Main memory of a rank under stage 3 that swaps to an NVMe."""
    host, plan = HostMemory(), swapping.plan
    (_parameters if plan.offload_param == "nvme" else parameters_host)(host, swapping)
    (_optimizer if plan.offload_optimizer == "nvme" else optimizer_host)(host, swapping)
    return host


def _parameters(host: HostMemory, swapping: Swapping) -> None:
    """Buffers, shards that are too small for a file, and flat ones of what is trained and stays in main memory."""
    plan, item = swapping.plan, swapping.item
    host.pin(swapping.param_buffers)
    moved = {parameter.key for tile in swapping.kept_tiles() for parameter in tile}
    small = [p for p in swapping.everything if not swapping.has_file(p) and p.numel > plan.persistence_threshold]
    blocks, own = [], 0
    for parameter in small:
        size = swapping.size(parameter)
        if plan.pin_param:
            block = host.pin(size)
            blocks += [block] if parameter.key in moved else []
        else:
            host.take(size)
            own += size if parameter.key in moved else 0
    host.give(host.take(swapping.converted))
    for numel in swapping.flats():
        host.pin(numel * item)
    for block in blocks:
        host.unpin(block)
    host.give(own)
    if swapping.written_back:
        host.keep(swapping.written_back, pinned=True)


def _optimizer(host: HostMemory, swapping: Swapping) -> None:
    """Buffers of the largest tile each, 16-bit gradients, and all of tiles that are too small for a file.

    Adam makes its states in memory of its own. They go when their tile is written; where tiles are pipelined, only
    when it is read again in the next step.
    """
    plan, tiles, swapped = swapping.plan, list(swapping.tiles()), swapping.swapped_tiles()
    for _ in range(plan.swap.optimizer_buffers):
        host.pin(swapping.optimizer_buffer)
    host.keep(sum(map(swapping.numel, tiles)) * swapping.item, pinned=plan.pin_optimizer)
    kept = swapping.kept_tiles() if plan.offload_param == "nvme" else tiles
    for tile in tiles:
        size = swapping.numel(tile) * WIDE
        if tile not in swapped:
            host.take(size)
            host.keep(size, pinned=plan.pin_optimizer)
            host.take(ADAM_STATES * size)
        elif tile not in kept and not plan.swap.fast_init:
            host.give(host.take(size))
    states = [ADAM_STATES * swapping.numel(tile) * WIDE for tile in swapped]
    if plan.swap.pipelines:
        host.take(sum(states))
    else:
        host.passing = max(states, default=0)
