"""FSDP 1 on paper: a layer's parameters are views of one flat tensor, and so are their gradients.

Source: torch 2.9, torch/distributed/fsdp/{_runtime_utils,_flat_param}.py. accelerate keeps what is trained in float32,
and PEFT makes each adapter a unit of its own (peft/utils/other.py), so that the layer's own unit is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.memory.fsdp.units import HALF, WIDE, Unit, Units
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.parallel.fsdp import FsdpPlan


class FlatUnits(Units):
    """Units under version 1.

    Args:
        ledger: Books every byte.
        everything: All parameters, in order.
        plan: The settings.
        world: Ranks.
        adapters: Whether adapters are what is trained. Where units are let go after their forward, those are gathered
            for a product only, which is left out: less than a thousandth of a layer. Otherwise they stay as the layer
            does, and are booked with it.
    """

    def __init__(
        self, ledger: Ledger, everything: Sequence[Parameter], plan: FsdpPlan, *, world: int, adapters: bool
    ) -> None:
        self.adapters = adapters
        super().__init__(ledger, everything, plan, world=world)
        self.small: dict[Key, Unit] = {}
        if adapters:
            self.small = {p.key: Unit([p], world=world) for p in everything if p.trained}
        self.first = {key[0]: key for key in reversed(self.small)}

    def unit(self, members: Sequence[Parameter]) -> Unit:
        """A unit of these parameters, adapters left out where they are gathered for a product only."""
        left_out = self.adapters and self.plan.reshards
        return Unit([p for p in members if not (left_out and p.trained)], world=self.world)

    def before_forward(self, unit: Unit) -> None:
        """pre_unshard and unshard."""
        if unit.whole is not None:
            return
        shard: Storage | None = None
        if not self.adapters:  # the float32 shard is cast first
            shard = self._buffer(unit.part * HALF)
            if self.plan.offloads:
                moved = self._buffer(unit.part * WIDE)
                del moved
        elif self.plan.offloads:
            shard = self._buffer(unit.part * HALF)
        unit.whole = self._weights(unit.part * self.world)
        del shard

    def after_forward(self, unit: Unit) -> None:
        """_post_forward_reshard; the root's parameters stay."""
        if self.plan.reshards:
            unit.whole = None

    def end_forward(self) -> None:
        """Nothing."""

    def before_backward(self, unit: Unit) -> None:
        """_pre_backward_hook."""
        if unit.busy:
            return
        unit.busy = True
        self.before_forward(unit)
        if unit is self.root or not self.adapters:
            self._prefetch(unit)

    def after_backward(self, unit: Unit) -> None:
        """_post_backward_reshard of a frozen unit; a trained one is let go with its gradient."""
        unit.done = True
        self._let_go(unit)

    def end_step(self) -> None:
        """The optimizer has worked."""
        super().end_step()
        for unit in self.small.values():
            unit.reduced = None

    def end_backward(self) -> None:
        """_post_backward_final_callback; only then are offloaded gradients gone from the card."""
        super().end_backward()
        if self.boundary and self.plan.offloads:
            self.end_step()

    def gradient(self, key: Key) -> Storage | None:
        """Nothing: what is accumulated is flat."""
        return None

    def receive(self, key: Key, leaf: Leaf) -> None:
        """The gradients of a unit's views wait until all have come, and are written out as one."""
        assert leaf.grad is not None
        unit = self.small.get(key) or self._owner(key)
        unit.kept[key], leaf.grad = leaf.grad, None
        if self.first.get(key[0]) == key:  # the unit before it in the order of the forward is the layer before
            self._prefetch(self._owner(key))
        if len(unit.kept) == len(unit.trained):
            self._flatten(unit)

    def _flatten(self, unit: Unit) -> None:
        flat = self._gradients(sum(parameter.numel for parameter in unit.trained.values()) * HALF)
        unit.kept.clear()
        unit.flat = unit.flat or flat
        if not self.adapters:
            unit.done = True
            self._let_go(unit)
        if self.boundary:
            flat, unit.flat = unit.flat, None
            half = self._gradients(unit.trained_part * HALF)
            high = self._gradients(unit.trained_part * WIDE)
            del half
            unit.reduced = high
        del flat

    def _prefetch(self, unit: Unit) -> None:
        following = self._before(unit)
        if self.plan.prefetches and following is not None:
            self.before_forward(following)

    def _let_go(self, unit: Unit) -> None:
        """_should_free_in_backward."""
        if self.boundary or self.plan.reshards:
            unit.whole = None
