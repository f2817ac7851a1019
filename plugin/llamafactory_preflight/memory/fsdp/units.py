"""FSDP on paper: decoder layers as units whose parameters are gathered around them, and the hooks that do it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

from llamafactory_preflight.memory.layers.decoder import DecoderLayer
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.sharding import ENDS, Key, Parameter
from llamafactory_preflight.parallel.fsdp import FsdpPlan


HALF, WIDE = dtypes.size(BFLOAT16), dtypes.size(FLOAT32)


class Unit:
    """Parameters that are gathered, let go and reduced together.

    Attributes:
        part: Elements of a rank's share, padding included.
        trained_part: The same of what is trained.
        whole: The gathered parameters, or None.
        ahead: What a gathering that nobody has waited for has filled.
        kept: Gradients that were not reduced yet, by parameter.
        reduced: This rank's share of reduced gradients.
    """

    __slots__ = ("ahead", "busy", "done", "flat", "kept", "part", "reduced", "trained", "trained_part", "whole")

    def __init__(self, members: Sequence[Parameter], *, world: int) -> None:
        self.trained = {parameter.key: parameter for parameter in members if parameter.trained}
        self.part = sum(-(-parameter.numel // world) for parameter in members)
        self.trained_part = sum(-(-parameter.numel // world) for parameter in self.trained.values())
        self.whole: Storage | None = None
        self.ahead: Storage | None = None
        self.flat: Storage | None = None
        self.reduced: Storage | None = None
        self.kept: dict[Key, Storage] = {}
        self.busy = self.done = False


class Units(ABC):
    """The units of a run: every layer, and around them the root, which has embedding, last norm and head.

    Args:
        ledger: Books every byte.
        everything: All parameters, in order.
        plan: The settings.
        world: Ranks.
    """

    def __init__(self, ledger: Ledger, everything: Sequence[Parameter], plan: FsdpPlan, *, world: int) -> None:
        self.ledger, self.plan, self.world = ledger, plan, world
        members: dict[int, list[Parameter]] = {}
        for parameter in everything:
            members.setdefault(parameter.key[0], []).append(parameter)
        self.root = self.unit(members.pop(ENDS))
        self.layers = [self.unit(members[layer]) for layer in sorted(members)]
        self.backward = False
        self.boundary = True

    def unit(self, members: Sequence[Parameter]) -> Unit:
        """A unit of these parameters."""
        return Unit(members, world=self.world)

    def begin_forward(self) -> None:
        """The root's parameters stay gathered for the whole forward."""
        self.before_forward(self.root)

    @abstractmethod
    def end_forward(self) -> None:
        """The root's forward has ended."""

    def begin_backward(self) -> None:
        """The loss has got its gradient."""
        self.backward = True
        self.before_backward(self.root)

    def end_backward(self) -> None:
        """Whatever was left over is let go."""
        for unit in (self.root, *self.layers):
            if not unit.done:
                self.after_backward(unit)
            unit.busy = unit.done = False
        self.backward = False

    def end_step(self) -> None:
        """The optimizer has worked, and zero_grad dropped the gradients."""
        for unit in (self.root, *self.layers):
            unit.reduced = None

    @abstractmethod
    def before_forward(self, unit: Unit) -> None:
        """Gathers a unit."""

    @abstractmethod
    def after_forward(self, unit: Unit) -> None:
        """Lets a layer's parameters go."""

    @abstractmethod
    def before_backward(self, unit: Unit) -> None:
        """Gathers a unit again, and the one whose backward is next."""

    @abstractmethod
    def after_backward(self, unit: Unit) -> None:
        """A unit's input has its gradient."""

    def gradient(self, key: Key) -> Storage | None:
        """What a parameter has accumulated by itself."""
        return self._owner(key).kept.get(key)

    @abstractmethod
    def receive(self, key: Key, leaf: Leaf) -> None:
        """A parameter's gradient came."""

    def _owner(self, key: Key) -> Unit:
        return self.root if key[0] == ENDS else self.layers[key[0]]

    def _before(self, unit: Unit) -> Unit | None:
        """The unit whose backward comes next."""
        number = len(self.layers) if unit is self.root else self.layers.index(unit)
        return self.layers[number - 1] if number else None

    def _weights(self, numel: int) -> Storage:
        return Storage(self.ledger, numel * HALF, "weights")

    def _buffer(self, size: int) -> Storage:
        return Storage(self.ledger, size, "buffers")

    def _gradients(self, size: int) -> Storage:
        return Storage(self.ledger, size, "gradients")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLayer(DecoderLayer):
    """A decoder layer with FSDP's hooks around it; run again for its backward, only the backward's."""

    unit: Unit
    units: Units

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Runs the layer; the hooks of its backward live in functions on its input and its output."""
        units, unit = self.units, self.unit
        again = units.backward
        (units.before_backward if again else units.before_forward)(unit)
        out = DecoderLayer.__call__(self, ops, ops.hooked(x, partial(units.after_backward, unit)))
        if again:
            return out
        units.after_forward(unit)
        return ops.hooked(out, partial(units.before_backward, unit))


def sharded(layer: DecoderLayer, unit: Unit, units: Units) -> ShardedLayer:
    """A layer as one unit."""
    own = {field.name: getattr(layer, field.name) for field in fields(DecoderLayer)}
    return ShardedLayer(**own, unit=unit, units=units)
