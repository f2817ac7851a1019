"""What lies on each card under DeepSpeed while nothing is computed: shards of ZeRO, masters, states and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from llamafactory_preflight.memory import optimizers, parameters, preference, sharding, statics
from llamafactory_preflight.memory.card import cublas_workspace
from llamafactory_preflight.memory.estimators.base import Estimator
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.ledger import Ledger
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero.stage2 import flat_group
from llamafactory_preflight.memory.zero.stage3 import partition
from llamafactory_preflight.memory.zero.stage3_gradients import ShardedGradients
from llamafactory_preflight.parallel.zero import ZeroPlan


class RestingEstimator(Estimator):
    """What a run under DeepSpeed holds on a card between steps, and what loading takes.

    Attributes:
        initializes: Whether stage 3 has zero.Init share parameters as they are made, with its side effects: it puts a
            function of its own in the place of F.linear, and makes a tied head before that is dropped.
    """

    initializes = True

    @cached_property
    def plan(self) -> ZeroPlan:
        """DeepSpeed's settings."""
        assert self.run.deepspeed is not None
        return ZeroPlan.from_config(self.run.deepspeed, hidden_size=self.shape.hidden_size)

    @cached_property
    def everything(self) -> Sequence[Parameter]:
        """All parameters, in order."""
        return sharding.in_order(self.run, self.shape)

    @cached_property
    def trained(self) -> Sequence[Sequence[Parameter]]:
        """What is trained, in the optimizer's groups."""
        return sharding.groups(self.everything)

    @cached_property
    def copied(self) -> Sequence[Parameter]:
        """The parameters of a second model, if there is one."""
        if not preference.loads_reference(self.run):
            return ()
        return sharding.frozen(self.shape)

    @cached_property
    def item(self) -> int:
        """Bytes of an element of the model."""
        return dtypes.size(self.precision.trained)

    def _ledger(self) -> Ledger:
        return Ledger(expandable_segments=self.card.expandable_segments)

    def _resting(self, rank: int) -> dict[str, int]:
        """What lies on a card between steps, by component."""
        offloads = self.plan.offload_optimizer != "none"
        held = {
            "weights": self.weights + self.reference,
            "adapters": self.adapters,
            "optimizer": sum(self._optimizer_bytes()),
            "gradients": 0,
            "buffers": 2 * cublas_workspace(self.card.compute_capability),
        }
        if self.plan.stage == 3:
            held |= self._partitioned()
        elif offloads:
            held["buffers"] += self.block(max(p.numel for group in self.trained for p in group) * self.item)
        return held

    def _optimizer_bytes(self) -> tuple[int, int]:
        """Float32 masters on a card, and the optimizer's states, which its first step makes."""
        if self.plan.offload_optimizer != "none":
            return 0, 0
        owned = self._owned()
        return sum(self.block(numel * dtypes.size(FLOAT32)) for numel in owned), self._optimizer(owned).states

    def _partitioned(self) -> dict[str, int]:
        """The same under stage 3: shards of all parameters and of what gradients are summed in, and the bucket."""
        world, offloads = self.ranks.world, self.plan.offload_param != "none"
        trained = sum(partition(p, world) for group in self.trained for p in group)
        frozen = sum(
            self.block(partition(p, world) * self.item)
            for p in (*self.everything, *self.copied)
            if not p.trained and not (offloads and p.numel > self.plan.persistence_threshold)
        )
        own = 0 if offloads else self.block(trained * self.item)
        adapters = self.run.finetuning_type in ADAPTERS
        summed = 0 if self.plan.offload_optimizer != "none" else self.block(trained * self.item)
        bucket = self.block(self.plan.reduce_bucket_size * self.item) if self.plan.contiguous_gradients else 0
        return {
            "weights": frozen + (0 if adapters else own),
            "adapters": own if adapters else 0,
            "gradients": summed + bucket,
        }

    def _load(self) -> int:
        """Loading and DeepSpeed's preparations; LLaMA-Factory makes what is trained float32 below stage 3."""
        held = self._resting(0)
        workspace = 2 * cublas_workspace(self.card.compute_capability)
        masters = [numel * dtypes.size(FLOAT32) for numel in self._owned()]
        offloads = self.plan.offload_optimizer != "none"
        if self.plan.stage == 3:
            shards = held["weights"] + held["adapters"]
            flat = 0 if offloads else sum(masters) + max(masters, default=0)
            gathered = 2 * max(self._largest(), sum(parameters.expert_tensors(self.shape)[1:])) * self.item
            final = sum(held.values()) - workspace - (0 if offloads else self._optimizer(self._owned()).states)
            return max(shards + flat, final + gathered * self.initializes)
        trained = sum(p.numel for group in self.trained for p in group)
        kept = not (self.run.pure_bf16 or self.run.use_badam)
        upcast = trained * (dtypes.size(FLOAT32) - self.item) if kept else 0
        casting = self._largest() * self.item if kept and self.run.finetuning_type == "full" else 0
        prepared = 0 if offloads else 2 * sum(masters)
        return self.weights + self.reference + self.adapters + max(upcast + casting, prepared)

    def _owned(self) -> list[int]:
        """Elements of the flat tensors that the optimizer of one rank works on."""
        world = self.ranks.world
        if self.plan.stage == 3:
            return ShardedGradients(self._ledger(), self.trained, self.plan, world=world, item=self.item).tiles
        if self.plan.stage == 0:
            return [parameter.numel for group in self.trained for parameter in group]
        groups = (flat_group(group, world=world, rank=0, round_robin=False) for group in self.trained)
        return [group.partition for group in groups]

    def _optimizer(self, sizes: Sequence[int]) -> OptimizerMemory:
        """States and scratch for flat float32 tensors of these sizes."""
        flat = [statics.Group(numel=size, count=1) for size in sizes]
        return optimizers.optimizer_memory(self.run, flat, FLOAT32, software=self.software, block=self.block)

    def _largest(self) -> int:
        return max((parameter.numel for parameter in self.everything), default=0)
