"""A run under DeepSpeed: the micro-steps of one step, with every gradient and parameter where ZeRO puts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

from llamafactory_preflight.memory import host, parameters
from llamafactory_preflight.memory.batch import evaluation_batch
from llamafactory_preflight.memory.estimators.base import evaluates, split_of
from llamafactory_preflight.memory.estimators.resting import RestingEstimator
from llamafactory_preflight.memory.layers.build import Builder
from llamafactory_preflight.memory.layers.checkpointing import kept_arguments
from llamafactory_preflight.memory.paper.ledger import Ledger, Mark, Storage, mark_bytes
from llamafactory_preflight.memory.paper.module_hooks import Modules
from llamafactory_preflight.memory.zero.engines import Engines, operations, reference_engine
from llamafactory_preflight.memory.zero.offload import stacked_bytes
from llamafactory_preflight.memory.zero.stage0 import WholeGradients
from llamafactory_preflight.memory.zero.stage2 import OVERFLOW_BYTES, PartitionedGradients, flat_group
from llamafactory_preflight.memory.zero.stage3 import Coordinator
from llamafactory_preflight.memory.zero.stage3_gradients import ShardedGradients


Gradients = WholeGradients | PartitionedGradients | ShardedGradients


class ShardedEstimator(RestingEstimator):
    """An estimate under way, for a run under DeepSpeed: of the rank that takes most."""

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
