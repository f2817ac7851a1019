"""DeepSpeed's engines in a run under ZeRO-3: one around the trained model, one around a reference that is a model too.

Source: trl 0.24, trl/models/utils.py (prepare_deepspeed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamafactory_preflight.memory.paper.ledger import Ledger
from llamafactory_preflight.memory.paper.module_hooks import Modules
from llamafactory_preflight.memory.paper.module_recording import Recorder, Recording
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero.stage3 import Coordinator
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan, without_auto


class Engines:
    """Follows micro-steps, each as the one of its kind before but for what the hooks on modules do.

    Args:
        ledger: Books every byte.
        hooks: Of the trained model's engine, and of the reference's if it has one.
        follow: Runs a micro-step with such hooks.
    """

    def __init__(self, ledger: Ledger, hooks: Sequence[Modules], follow: Callable[[Sequence[Modules]], None]) -> None:
        self._ledger, self._hooks, self._follow = ledger, hooks, follow
        self._recordings: dict[bool, Recording] = {}

    def micro_step(self, kind: bool) -> None:
        """One micro-step of a kind."""
        if kind in self._recordings:
            self._recordings[kind].repeat(self._ledger)
        else:
            recorder = Recorder(self._ledger)
            self._follow([recorder.watch(hooks) for hooks in self._hooks])
            self._recordings[kind] = recorder.finish()


def reference_engine(
    config: Mapping[str, Any],
    shape: ModelShape,
    copied: Sequence[Parameter],
    ledger: Ledger,
    *,
    world: int,
    item: int,
) -> list[Coordinator]:
    """The hooks of a reference's engine, or none; made before training, it knows no `auto` values yet."""
    plan = ZeroPlan.from_config(without_auto(config), hidden_size=shape.hidden_size)
    return [Coordinator(ledger, copied, plan, world=world, item=item)] if copied else []


def operations(ledger: Ledger, hooks: Sequence[Modules], *, own_linear: bool) -> list[Ops]:
    """What each engine's model runs with; without hooks one for all. `own_linear` is as zero.Init leaves it."""
    found = [Ops(ledger, autocast_dtype=None) for _ in hooks or (None,)]
    for ops, modules in zip(found, hooks, strict=False):
        ops.modules, ops.own_linear = modules, own_linear
    return found
