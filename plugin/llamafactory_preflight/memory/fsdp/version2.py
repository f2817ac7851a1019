"""FSDP 2 on paper: a layer's parameters are gathered into one buffer and copied out of it, each by itself.

Source: torch 2.9, torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_state}.py. accelerate
keeps all parameters in float32, frozen ones too, and computes and reduces in 16 bit (utils/fsdp_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.memory.fsdp.units import HALF, WIDE, Unit, Units
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.parallel.fsdp import FsdpPlan


class ParameterUnits(Units):
    """Units under version 2.

    Args:
        ledger: Books every byte.
        everything: All parameters, in order.
        plan: The settings.
        world: Ranks.
        root_reshards: Whether the root too lets go of its parameters after the forward.
    """

    def __init__(
        self, ledger: Ledger, everything: Sequence[Parameter], plan: FsdpPlan, *, world: int, root_reshards: bool
    ) -> None:
        super().__init__(ledger, everything, plan, world=world)
        self.root_reshards = root_reshards
        self.last_gathered: Storage | None = None
        self.last_reduced: Storage | None = None

    def before_forward(self, unit: Unit) -> None:
        """The buffer of the gathering before stays until this one is copied out: a local name holds it."""
        if unit.whole is not None:
            return
        self._gather(unit)
        self.last_gathered = self._copy_out(unit)

    def after_forward(self, unit: Unit) -> None:
        """Reshard."""
        if self.plan.reshards:
            unit.whole = None

    def end_forward(self) -> None:
        """The root's post_forward."""
        if self.root_reshards:
            self.root.whole = None
        self.last_gathered = None

    def before_backward(self, unit: Unit) -> None:
        """pre_backward: waits for the unit, and fills the buffer of the next."""
        if unit.busy:
            return
        unit.busy = True
        self._gather(unit)
        self._copy_out(unit)
        following = self._before(unit)
        if following is not None:
            self._gather(following)

    def after_backward(self, unit: Unit) -> None:
        """post_backward and foreach_reduce."""
        unit.done = True
        unit.ahead = unit.whole = None
        if not self.boundary or not unit.kept:
            return
        self.last_reduced = None
        flat = self._gradients(unit.trained_part * self.world * HALF)
        last = unit.kept[[key for key in unit.trained if key in unit.kept][-1]]  # a loop's variable holds it
        unit.kept.clear()
        half = self._gradients(unit.trained_part * HALF)
        high = self._gradients(unit.trained_part * WIDE)
        del half, last
        self.last_reduced = flat
        unit.reduced = None if self.plan.offloads else high

    def end_backward(self) -> None:
        """root_post_backward_final_callback."""
        super().end_backward()
        self.last_reduced = None

    def receive(self, key: Key, leaf: Leaf) -> None:
        """A gradient is kept in 16 bit until its unit is done, without synchronization until the last micro-step."""
        assert leaf.grad is not None
        kept = self._owner(key).kept
        kept.pop(key, None)
        kept[key], leaf.grad = leaf.grad, None

    def _gather(self, unit: Unit) -> None:
        """foreach_all_gather: a cast copy of the shards is copied into the buffer."""
        if unit.whole is not None or unit.ahead is not None:
            return
        copy = self._buffer(unit.part * HALF)
        unit.ahead = self._buffer(unit.part * self.world * HALF)
        del copy

    def _copy_out(self, unit: Unit) -> Storage | None:
        """foreach_all_gather_copy_out; returns the buffer."""
        if unit.ahead is None:
            return None
        unit.whole = self._weights(unit.part * self.world)
        buffer, unit.ahead = unit.ahead, None
        return buffer
