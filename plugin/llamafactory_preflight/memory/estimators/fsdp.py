"""A run under FSDP: the micro-steps of one step, with layers gathered around their use and gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from llamafactory_preflight.memory import optimizers, parameters, sharding, statics
from llamafactory_preflight.memory.batch import Batch, evaluation_batch
from llamafactory_preflight.memory.card import cublas_workspace
from llamafactory_preflight.memory.estimators.base import Estimator, evaluates, split_of
from llamafactory_preflight.memory.estimators.fsdp_host import fsdp_host
from llamafactory_preflight.memory.fsdp.units import HALF, WIDE, Unit, Units, sharded
from llamafactory_preflight.memory.fsdp.version1 import FlatUnits
from llamafactory_preflight.memory.fsdp.version2 import ParameterUnits
from llamafactory_preflight.memory.host import HostNeed
from llamafactory_preflight.memory.layers import step
from llamafactory_preflight.memory.layers.build import ADAPTERS, Builder
from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Ledger, Mark, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.quantization import quantization, weight_bytes
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.parallel.fsdp import FsdpPlan


class _UncachedOps(Ops):
    """Operations whose weights are gathered in 16 bit: autocast finds nothing to cast, and keeps no copies."""

    def lower_weight(self, weight: Weight) -> Tensor:
        """The gathered parameter."""
        return self.cast(weight, self.lower_dtype(weight.dtype), "buffers")


class FsdpEstimator(Estimator):
    """An estimate under way, for a run under FSDP."""

    @cached_property
    def plan(self) -> FsdpPlan:
        """FSDP's settings."""
        assert self.run.fsdp_plan is not None
        return self.run.fsdp_plan

    @cached_property
    def everything(self) -> Sequence[Parameter]:
        """All parameters, in order; quantized weights as the 16-bit numbers that they are stored in."""
        kind, linears = quantization(self.run, self.shape), parameters.layer_linears(self.shape)
        return [
            replace(p, numel=-(-p.numel * kind.bits // (8 * HALF))) if kind and p.key[1] in linears else p
            for p in sharding.in_order(self.run, self.shape)
        ]

    @cached_property
    def statistics(self) -> int:
        """What brings quantized weights back: it lies beside them, whole on every card."""
        kind = quantization(self.run, self.shape)
        if kind is None:
            return 0
        return self.shape.num_layers * sum(
            weight_bytes(kind, linear.numel, linear.out_features, self.block) - linear.numel * kind.bits // 8
            for linear in parameters.layer_linears(self.shape).values()
        )

    @cached_property
    def shards(self) -> Sequence[tuple[int, bool]]:
        """Bytes of each tensor that a rank keeps of the parameters, and whether it is trained.

        Version 1 has one a unit (each adapter is one), version 2 one a parameter, all in float32.
        """
        world, adapters = self.ranks.world, self.run.finetuning_type in ADAPTERS
        if self.plan.version == 2:
            return [(-(-p.numel // world) * WIDE, p.trained) for p in self.everything]
        item = HALF if adapters else WIDE
        units: dict[int, int] = {}
        for p in self.everything:
            if not (adapters and p.trained):
                units[p.key[0]] = units.get(p.key[0], 0) + p.numel
        small = [(-(-p.numel // world) * WIDE, True) for p in self.everything if adapters and p.trained]
        return [(-(-numel // world) * item, not adapters) for numel in units.values()] + small

    def _held(self, *, trained: bool) -> int:
        """Bytes of shards on the card."""
        return 0 if self.plan.offloads else sum(self.block(size) for size, is_so in self.shards if is_so is trained)

    def _optimizer(self) -> OptimizerMemory:
        """The optimizer of a rank's shares; on the card unless they are offloaded."""
        shares = [-(-p.numel // self.ranks.world) for p in self.everything if p.trained]
        groups = [statics.Group(numel=numel, count=1) for numel in shares]
        return optimizers.optimizer_memory(self.run, groups, FLOAT32, software=self.software, block=self.block)

    def _resting(self) -> dict[str, int]:
        adapters = self.run.finetuning_type in ADAPTERS
        trained = self._held(trained=True)
        return {
            "weights": self.statistics + self._held(trained=False) + (0 if adapters else trained),
            "adapters": trained if adapters else 0,
            "optimizer": 0 if self.plan.offloads else self._optimizer().states,
            "buffers": 2 * cublas_workspace(self.card.compute_capability),
        }

    def phases(self) -> tuple[dict[str, int], dict[str, int]]:
        """As for one GPU; all ranks take the same."""
        busy, stepping = self._step()
        resting = sum(self._resting().values())
        phases = {
            "load": self._load(),
            "forward_backward": busy[0],
            "optimizer_step": stepping[0],
            "save": resting + self.fetched + self._saving(),
            "evaluate": self.evaluate(),
        }
        return phases, split_of(phases["load"], busy, stepping)

    def _root(self) -> Unit:
        return Unit([p for p in self.everything if p.key[0] == sharding.ENDS], world=self.ranks.world)

    def _saving(self) -> int:
        """A full state dict is gathered unit by unit, and moved to main memory as it comes."""
        wide = self.plan.version == 2 or self.run.finetuning_type not in ADAPTERS
        return self._root().part * self.ranks.world * (WIDE if wide else HALF)

    def _load(self) -> int:
        """Weights come by way of main memory where they load once, else whole to each card (LLaMA-Factory's map).

        Version 1 then flattens one unit after the other, the root last; version 2 keeps the whole until all is cut,
        and cuts a tied head that the state dict names beside the embedding once more.
        """
        adapters = self.run.finetuning_type in ADAPTERS
        item = HALF if adapters else WIDE
        shards = sum(size for size, _ in self.shards) if not self.plan.offloads else 0
        root = self._root().part * self.ranks.world * item
        if self.plan.version == 1:
            on_card = self.statistics or not self.plan.loads_once
            whole = sum(p.numel * (WIDE if p.trained else HALF) for p in self.everything) if on_card else 0
            own = root // self.ranks.world
            return self.statistics + max(shards + 2 * root + (own if self.plan.offloads else 0), whole + own)
        if self.plan.loads_once:
            tied = root // self.ranks.world if self.shape.tie_word_embeddings and not adapters else 0
            return sum(size for size, _ in self.shards) + root + tied
        return sum(p.numel * (WIDE if p.trained else HALF) for p in self.everything) + shards

    def _units(self, ledger: Ledger) -> Units:
        world = self.ranks.world
        if self.plan.version == 1:
            adapters = self.run.finetuning_type in ADAPTERS
            return FlatUnits(ledger, self.everything, self.plan, world=world, adapters=adapters)
        # Until torch 2.8 a root never let go of its parameters, whatever was asked for.
        reshards = self.plan.reshards and self.software.at_least("torch", 2, 8)
        return ParameterUnits(ledger, self.everything, self.plan, world=world, root_reshards=reshards)

    def _model(self, ops: Ops, units: Units, batch: Batch) -> step.Model:
        model = Builder(self.run, self.shape, ops, fresh_gradients=True, gradients=units).model(batch)
        segments = [
            replace(segment, layer=sharded(segment.layer, unit, units))
            for segment, unit in zip(model.segments, units.layers, strict=True)
        ]
        return replace(model, segments=segments)

    def _step(self) -> tuple[Mark, Mark]:
        """One optimizer step; without synchronization until its last micro-step, gradients stay whole."""
        ledger = Ledger(expandable_segments=self.card.expandable_segments)
        held = [Storage(ledger, size, name) for name, size in self._resting().items()]
        units = self._units(ledger)
        for units.boundary in self._micro_steps():
            ops = _UncachedOps(ledger, autocast_dtype=self.precision.autocast)
            model = self._model(ops, units, self.batch)
            units.begin_forward()
            loss = step.language_model_loss(ops, model, self.batch.tokens)
            units.end_forward()
            loss = ops.hooked(loss, units.begin_backward)
            step.backward(ops, loss)
            units.end_backward()
            del model, loss
        busy = ledger.take_peak()
        held.append(Storage(ledger, self.fetched, "activations"))
        scratch = Storage(ledger, 0 if self.plan.offloads else self._optimizer().step, "buffers")
        stepping = ledger.take_peak()
        units.end_step()
        del held, scratch
        return busy, stepping

    def _micro_steps(self) -> Sequence[bool]:
        return [False] * min(self.run.gradient_accumulation_steps - 1, 2) + [True]

    def evaluate(self) -> int:
        """Peak of an evaluation step, or 0 where the run evaluates nothing."""
        if not evaluates(self.run):
            return 0
        ledger = Ledger(expandable_segments=self.card.expandable_segments)
        held = [Storage(ledger, size, name) for name, size in self._resting().items()]
        held.append(Storage(ledger, self.fetched, "activations"))
        units = self._units(ledger)
        ops = _UncachedOps(ledger, autocast_dtype=self.precision.autocast)
        batch = evaluation_batch(self.run, self.shape.vision, self.eval_length, self.images)
        with ops.no_grad():
            units.begin_forward()
            step.evaluation_step(ops, self._model(ops, units, batch), batch.tokens)
        del held
        return ledger.take_peak()[0]

    def host(self, split: Mapping[str, int]) -> HostNeed:
        """Main memory of all processes here."""
        loaded = sum(p.numel * (WIDE if p.trained else dtypes.size(self.precision.loaded)) for p in self.everything)
        trained = sum(p.numel * WIDE for p in self.everything if p.trained)
        return fsdp_host(self.run, self.plan, self.shards, self.ranks, loaded=loaded, trained=trained)
