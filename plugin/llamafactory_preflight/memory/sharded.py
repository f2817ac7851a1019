"""A run under DeepSpeed: the micro-steps of one step, with every gradient and parameter where ZeRO puts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

from llamafactory_preflight.memory import dtypes, host, optimizers, parameters, preference, sharding, statics
from llamafactory_preflight.memory.batch import evaluation_batch
from llamafactory_preflight.memory.build import ADAPTERS, Builder
from llamafactory_preflight.memory.card import cublas_workspace
from llamafactory_preflight.memory.checkpointing import kept_arguments
from llamafactory_preflight.memory.dtypes import FLOAT32
from llamafactory_preflight.memory.estimator import Estimator, evaluates, split_of
from llamafactory_preflight.memory.module_hooks import Modules
from llamafactory_preflight.memory.offload import stacked_bytes
from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import Ledger, Mark, Storage, mark_bytes
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero0 import WholeGradients
from llamafactory_preflight.memory.zero2 import OVERFLOW_BYTES, PartitionedGradients, flat_group
from llamafactory_preflight.memory.zero3 import Coordinator, partition
from llamafactory_preflight.memory.zero3_engines import Engines, operations, reference_engine
from llamafactory_preflight.memory.zero3_gradients import ShardedGradients
from llamafactory_preflight.zero import ZeroPlan


Gradients = WholeGradients | PartitionedGradients | ShardedGradients


class ShardedEstimator(Estimator):
    """An estimate under way, for a run under DeepSpeed: of the rank that takes most.

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

    @cached_property
    def left(self) -> int:
        """Bytes of a micro-step that are alive when its backward ends, and while the engine then updates weights."""
        return self.fetched + kept_arguments(self.run, self.batch, self.shape, item=self.item)

    @cached_property
    def recent(self) -> bool:
        """Whether DeepSpeed checks for overflows without copies, and lets go what a backward has left."""
        return self.software.at_least("deepspeed", 0, 19, 6)

    def phases(self) -> tuple[dict[str, int], dict[str, int]]:
        """As for one GPU; of the ranks, the one with the largest peak counts in each phase."""
        busy: Mark = (0, {})
        stepping: Mark = (0, {})
        for rank in self._ranks():
            one, other = self._step(rank)
            busy, stepping = max(busy, one, key=mark_bytes), max(stepping, other, key=mark_bytes)
        resting = self.fetched + sum(size for name, size in self._resting(0).items() if name != "gradients")
        phases = {
            "load": self._load(),
            "forward_backward": busy[0],
            "optimizer_step": stepping[0],
            "save": resting + (self._largest() * self.item * 2 if self.plan.stage == 3 else 0),
            "evaluate": self.evaluate(),
        }
        return phases, split_of(phases["load"], busy, stepping)

    def ledger(self, *, gradients: bool, states: bool = True) -> tuple[Ledger, list[Storage]]:
        """A ledger with all that lies on the first card between steps."""
        ledger = self._ledger()
        return ledger, [Storage(ledger, size, name) for name, size in self._resting(0).items()]

    def evaluate(self) -> int:
        """Stage 3 gathers for an evaluation in the order that it knows from training, where a backward comes next."""
        if self.plan.stage < 3 or not evaluates(self.run):
            return super().evaluate()
        ledger, held = self.ledger(gradients=False)
        gradients, coordinator = self._gradients(ledger, 0)
        assert coordinator is not None
        hooks = self._hooks(ledger, coordinator)
        for gradients.boundary in (True, True):
            self._follow(ledger, gradients, hooks)
            coordinator.release_all()
            coordinator.gather_persistent()
        ledger.take_peak()
        held.append(Storage(ledger, self.fetched, "activations"))
        batch = evaluation_batch(self.run, self.shape.vision, self.eval_length, self.images)
        for _ in range(2):
            each = operations(ledger, hooks, own_linear=self.initializes)
            builder = Builder(self.run, self.shape, each[0], fresh_gradients=True, gradients=gradients)
            with each[0].no_grad():
                self._run(each[0], builder, batch, each[-1])
        del held
        return ledger.take_peak()[0]

    def host(self, split: Mapping[str, int]) -> host.HostNeed:
        """Main memory of all processes here."""
        tied = parameters.embedding_numel(self.shape) if self.shape.tie_word_embeddings and self.initializes else 0
        return host.deepspeed_host(
            self.run,
            self.plan,
            self.everything,
            self.trained,
            self.copied,
            self.ranks,
            item=self.item,
            inputs=self.shape.num_layers * self.batch.tokens * self.shape.hidden_size * self.item,
            state_dict=self.weights + self.adapters + tied * self.item,
            tied=tied,
            converted=stacked_bytes(self.shape, item=self.item),
        )

    def remarks(self) -> Iterator[str]:
        """What else is to be said."""
        yield from super().remarks()
        if self.plan.stage == 3 and stacked_bytes(self.shape, item=self.item):
            yield "While experts load under ZeRO-3, each process stacks all of them in main memory."

    def _ranks(self) -> Sequence[int]:
        """Ranks that may take most: shares differ below stage 3 only, by which tensors lie in them."""
        return sorted({0, self.ranks.world // 2, self.ranks.world - 1}) if self.plan.stage in (1, 2) else (0,)

    def _largest(self) -> int:
        return max((parameter.numel for parameter in self.everything), default=0)

    def _optimizer(self, sizes: Sequence[int]) -> OptimizerMemory:
        """States and scratch for flat float32 tensors of these sizes."""
        flat = [statics.Group(numel=size, count=1) for size in sizes]
        return optimizers.optimizer_memory(self.run, flat, FLOAT32, software=self.software, block=self.block)

    def _owned(self) -> list[int]:
        """Elements of the flat tensors that the optimizer of one rank works on."""
        world = self.ranks.world
        if self.plan.stage == 3:
            return ShardedGradients(self._ledger(), self.trained, self.plan, world=world, item=self.item).tiles
        if self.plan.stage == 0:
            return [parameter.numel for group in self.trained for parameter in group]
        groups = (flat_group(group, world=world, rank=0, round_robin=False) for group in self.trained)
        return [group.partition for group in groups]

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

    def _step(self, rank: int) -> tuple[Mark, Mark]:
        """One optimizer step: forward and backward of its micro-steps, then the optimizer's part."""
        ledger = self._ledger()
        held = [Storage(ledger, size, name) for name, size in self._resting(rank).items() if name != "optimizer"]
        masters, states = self._optimizer_bytes()
        held.append(Storage(ledger, masters, "optimizer"))
        gradients, coordinator = self._gradients(ledger, rank)
        hooks = [] if coordinator is None else self._hooks(ledger, coordinator)
        follow = partial(self._follow, ledger, gradients)
        engines = Engines(ledger, hooks, follow)
        busy: Mark = (0, {})
        later = Storage(ledger, 0 if coordinator is not None else states, "optimizer")
        for gradients.boundary in self._micro_steps():
            if coordinator is None:
                self._follow(ledger, gradients, ())
                continue
            engines.micro_step(gradients.boundary and self.plan.offload_optimizer != "none")
            if self.recent:
                coordinator.release_leftovers()
            if gradients.boundary:
                coordinator.release_all()
                busy = max(busy, ledger.take_peak(), key=mark_bytes)
                later = later if later.size else Storage(ledger, states, "optimizer")
                coordinator.gather_persistent()
        busy = max(busy, ledger.take_peak(), key=mark_bytes)
        if coordinator is not None:
            coordinator.release_all()
        held.append(Storage(ledger, self.left, "activations"))
        gradients.step(self._optimizer)
        stepping = ledger.take_peak()
        del held
        return busy, stepping

    def _follow(self, ledger: Ledger, gradients: Gradients, modules: Sequence[Modules]) -> None:
        """One micro-step, with the hooks on the modules of the trained model and of the reference."""
        each = operations(ledger, modules, own_linear=self.initializes)
        builder = Builder(self.run, self.shape, each[0], fresh_gradients=True, gradients=gradients)
        self._run(each[0], builder, self.batch, each[-1])
        left = Storage(ledger, self.left, "activations")
        gradients.end_backward()
        del left

    def _hooks(self, ledger: Ledger, coordinator: Coordinator) -> list[Coordinator]:
        """Those of the trained model, and of a reference that has an engine of its own."""
        assert self.run.deepspeed is not None
        config, world = self.run.deepspeed, self.ranks.world
        return [coordinator, *reference_engine(config, self.shape, self.copied, ledger, world=world, item=self.item)]

    def _micro_steps(self) -> Sequence[bool]:
        """Whether each of the micro-steps that are looked at is the last of its step.

        Under stage 3 the first one fetches nothing ahead, and those of later steps begin with parameters let go.
        """
        step = (False, True) if self.run.gradient_accumulation_steps > 1 else (True,)
        return step if self.plan.stage < 3 else step * 2

    def _gradients(self, ledger: Ledger, rank: int) -> tuple[Gradients, Coordinator | None]:
        world, plan = self.ranks.world, self.plan
        if plan.stage == 0:
            return WholeGradients(ledger, self.trained, item=self.item), None
        if plan.stage == 3:
            coordinator = Coordinator(ledger, self.everything, plan, world=world, item=self.item)
            return ShardedGradients(ledger, self.trained, plan, world=world, item=self.item), coordinator
        flat = [
            flat_group(group, world=world, rank=rank, round_robin=plan.round_robin_gradients) for group in self.trained
        ]
        checked = 0 if self.recent else OVERFLOW_BYTES
        return PartitionedGradients(ledger, flat, plan, item=self.item, rank=rank, overflow_bytes=checked), None
