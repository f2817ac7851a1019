"""Main memory of one rank under DeepSpeed, as it grows: flat buffers, page-locked copies, optimizer states, saving.

Source: deepspeed 0.18.4, runtime/zero/{stage_1_and_2,stage3,partition_parameters}.py; page-locked memory comes from
torch's CachingHostAllocator, which rounds up to a power of two and gives nothing back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory import parameters
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero.stage2 import flat_group
from llamafactory_preflight.memory.zero.stage3 import partition
from llamafactory_preflight.memory.zero.stage3_gradients import tiles
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan


ADAM_STATES = 2
WIDE = dtypes.size(FLOAT32)


class HostMemory:
    """Bytes that a process holds: its own and page-locked ones, with the highest mark of both together.

    Attributes:
        passing: What each optimizer step takes beside them for a moment.
    """

    def __init__(self) -> None:
        self.own = self.pinned = self.peak = self.passing = 0
        self.free: Counter[int] = Counter()

    def take(self, size: int) -> int:
        """Own memory."""
        self.own += size
        self.peak = max(self.peak, self.own + self.pinned)
        return size

    def give(self, size: int) -> None:
        """Gives own memory back."""
        self.own -= size

    def pin(self, size: int) -> int:
        """A page-locked block: one that was given back before, or a new one."""
        block = 1 << max(0, size - 1).bit_length()
        if self.free[block]:
            self.free[block] -= 1
        else:
            self.pinned += block
            self.peak = max(self.peak, self.own + self.pinned)
        return block

    def unpin(self, block: int) -> None:
        """Leaves a block to the allocator's cache."""
        self.free[block] += 1

    def keep(self, size: int, *, pinned: bool) -> None:
        """Memory that stays: made as its own, then copied to page-locked memory if asked for."""
        self.take(size)
        if pinned:
            self.pin(size)
            self.give(size)


def zero2_host(
    groups: Sequence[Sequence[Parameter]], plan: ZeroPlan, *, world: int, rank: int, item: int, accumulates: bool
) -> HostMemory:
    """Stages 1 and 2: parameters are laid out flat in main memory first; then what is offloaded."""
    host, pinned = HostMemory(), plan.pin_optimizer
    flat = [flat_group(group, world=world, rank=rank, round_robin=plan.round_robin_gradients) for group in groups]
    offloads = plan.offload_optimizer != "none"
    for group in flat:
        host.give(host.take(2 * group.numel * item))
        if offloads:
            host.keep(group.partition * WIDE, pinned=pinned)
            host.keep(group.partition * item, pinned=pinned)
    if not offloads:
        return host
    host.keep(max(share.parameter.numel for group in flat for share in group.shares) * item, pinned=pinned)
    for group in flat:
        host.keep(group.partition * WIDE, pinned=pinned)
    for group in flat:
        for share in group.shares:
            if accumulates and share.mine:
                host.keep(share.parameter.numel * item, pinned=pinned)
    host.take(sum(ADAM_STATES * group.partition * WIDE for group in flat))
    return host


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What stage 3 shares out among the ranks.

    Attributes:
        everything: All parameters.
        groups: What is trained, in the optimizer's groups.
        copied: The parameters of a second model.
        plan: DeepSpeed's settings.
        world: Ranks.
        item: Bytes of an element of the model.
        tied: Elements of a head that is made and shared out like any other, and dropped for the embedding only then; 0
            without one. Page-locked memory does not come back.
        converted: Bytes of what loads that are made new before the shards get them.
    """

    everything: Sequence[Parameter]
    groups: Sequence[Sequence[Parameter]]
    copied: Sequence[Parameter] = ()
    plan: ZeroPlan
    world: int
    item: int
    tied: int = 0
    converted: int = 0

    @property
    def trained(self) -> int:
        """Elements of this rank's part of what is trained."""
        return sum(partition(parameter, self.world) for group in self.groups for parameter in group)


def zero3_host(sharing: Sharing) -> HostMemory:
    """Stage 3: shards of parameters, then flat copies of what is trained, float32 masters, gradients and states.

    Where masters and parameters lie on different sides, a step changes the type of a tile on the host: torch converts
    there whatever it copies without `non_blocking`.
    """
    host = HostMemory()
    parameters_host(host, sharing)
    optimizer_host(host, sharing)
    return host


def parameters_host(host: HostMemory, sharing: Sharing) -> None:
    """What stage 3 keeps in main memory of the parameters themselves, or takes there as it lays them out."""
    if sharing.plan.offload_param == "none":
        host.give(host.take(max(sharing.converted, sharing.trained * sharing.item)))
        return
    blocks, own = _place_shards(host, sharing, sharing.everything, tied=sharing.tied)
    host.give(host.take(sharing.converted))
    _place_shards(host, sharing, sharing.copied, tied=sharing.tied if sharing.copied else 0)
    _flatten_trained(host, sharing, blocks, own)


def optimizer_host(host: HostMemory, sharing: Sharing) -> None:
    """What stage 3 keeps in main memory for the optimizer, or takes there for each step."""
    plan, item = sharing.plan, sharing.item
    sizes = [tile for group in sharing.groups for tile in tiles(group, plan.sub_group_size, sharing.world)]
    largest_tile = max(sizes, default=0)
    if plan.offload_optimizer == "none":
        host.passing = largest_tile * WIDE if plan.offload_param != "none" else 0
        return
    host.passing = largest_tile * item if plan.offload_param == "none" else 0
    for size in sizes:
        host.take(size * WIDE)
        host.give(host.take(size * WIDE))
    largest = host.take(largest_tile * WIDE)
    for size in sizes:
        host.keep(size * WIDE, pinned=plan.pin_optimizer)
    host.give(largest)
    host.keep(sharing.trained * item, pinned=plan.pin_optimizer)
    host.take(ADAM_STATES * sum(sizes) * WIDE)


def _place_shards(
    host: HostMemory, sharing: Sharing, everything: Sequence[Parameter], *, tied: int
) -> tuple[list[int], int]:
    """A shard for each parameter; returns the page-locked blocks, and the own bytes, of what is trained."""
    plan, world, item = sharing.plan, sharing.world, sharing.item
    blocks, own = [], 0
    head = host.pin(-(-tied // world) * item) if plan.pin_param and tied else 0
    for parameter in everything:
        size = partition(parameter, world) * item
        if parameter.numel <= plan.persistence_threshold:
            continue
        if plan.pin_param:
            block = host.pin(size)
            blocks += [block] if parameter.trained else []
        else:
            host.take(size)
            own += size if parameter.trained else 0
    if head:
        host.unpin(head)
    return blocks, own


def _flatten_trained(host: HostMemory, sharing: Sharing, blocks: Sequence[int], own: int) -> None:
    """The shards of what is trained move to a flat one, which is page-locked in any case."""
    for group in sharing.groups:
        host.pin(sum(partition(parameter, sharing.world) for parameter in group) * sharing.item)
    for block in blocks:
        host.unpin(block)
    host.give(own)


def stacked_bytes(shape: ModelShape, *, item: int) -> int:
    """What a rank makes of a checkpoint's experts while it loads under stage 3: all of them stacked, and two halves.

    Source: transformers/integrations/deepspeed.py (_apply_weight_conversions_to_state_dict), which every rank runs.
    """
    if shape.moe is None or not shape.moe.stacked:
        return 0
    _, gate_up, down = parameters.expert_tensors(shape)
    return (shape.num_layers * (gate_up + down) + gate_up) * item
