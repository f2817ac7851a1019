"""One estimate under way: what lies on the card, and the phases of a run on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import badam, optimizers, parameters, preference, statics
from llamafactory_preflight.memory.batch import Batch, evaluation_batch, fetched_bytes, training_batch
from llamafactory_preflight.memory.card import Card, cublas_workspace
from llamafactory_preflight.memory.estimators import inference
from llamafactory_preflight.memory.host import PROCESS_BYTES, HostNeed, host_bytes, host_remarks, preprocessing_bytes
from llamafactory_preflight.memory.layers import step
from llamafactory_preflight.memory.layers.build import ADAPTERS, Builder
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.ledger import COMPONENTS, Ledger, Mark, Storage, mark_bytes
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.memory.remarks import by_size, remarks
from llamafactory_preflight.memory.result import MemoryEstimate, bounds
from llamafactory_preflight.memory.sharding import NCCL_BYTES, Ranks, ddp_bucket_bytes, ddp_sync_bytes, in_order
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


class Estimator:
    """One estimate under way, for a run in which every rank holds the whole model (torch's DistributedDataParallel).

    Args:
        run: The run.
        shape: The model.
        software: Installed versions.
        card: The card.
        length: Tokens of the longest sample, if known.
        ranks: How many processes train together.
        images: The images of a sample, or None for text.
        eval_length: Tokens of the longest sample that is evaluated, if known.
    """

    def __init__(
        self,
        run: RunDescription,
        shape: ModelShape,
        software: Software,
        card: Card,
        length: int | None,
        ranks: Ranks,
        images: Images | None = None,
        eval_length: int | None = None,
    ) -> None:
        self.run, self.shape, self.software, self.card, self.ranks = run, shape, software, card, ranks
        self.images, self.eval_length = images, eval_length
        if run.use_badam and ranks.world > 1:
            raise Unmodelled("BAdam on several GPUs takes DeepSpeed ZeRO-3, for which it has no formula yet")
        self.batch = training_batch(run, shape.vision, length, images)
        self.precision = precision(run, shape)
        self.fetched = fetched_bytes(run, self.batch, shape.vision, mask=self.precision.compute)
        self.block = Ledger(expandable_segments=card.expandable_segments).block
        self.groups = statics.trainable_groups(run, shape)
        self.optimizer = optimizers.optimizer_memory(
            run, self.groups, self.precision.trained, software=software, block=self.block
        )
        itemsize = dtypes.size(self.precision.trained)
        self.gradients = statics.tensor_bytes(self.groups, itemsize, self.block)
        self.weights = statics.base_weight_bytes(
            run, shape, loaded=self.precision.loaded, trained=self.precision.trained, block=self.block
        )
        self.adapters = self.gradients if run.finetuning_type in ADAPTERS else 0
        self.adapters += statics.adapter_buffer_bytes(run, shape, self.block)
        self.reference = self._reference_bytes()
        in_buckets = ranks.world > 1 and run.deepspeed is None and run.fsdp_plan is None
        self.buckets = ddp_bucket_bytes(run, shape, itemsize, self.block) if in_buckets else 0

    def _reference_bytes(self) -> int:
        """Weights of a second model: for full and freeze tuning the model itself once more, as it was loaded."""
        if not preference.loads_reference(self.run):
            return 0
        vision = self.shape.vision.numel if self.shape.vision is not None else 0
        return (statics.total(statics.model_groups(self.shape)) + vision) * dtypes.size(self.precision.loaded)

    @property
    def fresh_gradients(self) -> bool:
        """Without accumulation no gradient is alive when a forward begins."""
        return self.run.gradient_accumulation_steps == 1

    def ledger(self, *, gradients: bool, states: bool = True) -> tuple[Ledger, list[Storage]]:
        """A ledger with all that lies on the card between steps."""
        ledger = Ledger(expandable_segments=self.card.expandable_segments)
        held = {
            "weights": self.weights + self.reference,
            "adapters": self.adapters,
            "optimizer": self.optimizer.masters + (self.optimizer.states if states else 0),
            "gradients": self.gradients if gradients else 0,
            "buffers": self.buckets + 2 * cublas_workspace(self.card.compute_capability),
        }
        return ledger, [Storage(ledger, size, name) for name, size in held.items()]

    def forward_backward(self) -> tuple[int, dict[str, int]]:
        """Peak over the micro-steps of all steps, and its split.

        From the second step on optimizer states exist; the first is higher only where it tunes kernels.
        """
        if self.run.use_badam:
            visits = badam.fullest(self.run, self.shape.num_layers)
            peaks = [self._micro_step(first=visit.first, block=visit.block) for visit in visits]
            return max(peaks, key=lambda peak: peak[0])
        steady = self._micro_step(first=False)
        tunes = self.shape.moe is not None and self.shape.moe.stacked and self.run.enable_liger_kernel
        return max(steady, self._micro_step(first=True), key=lambda peak: peak[0]) if tunes else steady

    def _micro_step(self, *, first: bool, block: int | None = None) -> tuple[int, dict[str, int]]:
        ledger, held = self.ledger(gradients=not self.fresh_gradients, states=not first)
        ops = Ops(ledger, autocast_dtype=self.precision.autocast)
        builder = Builder(
            self.run, self.shape, ops, fresh_gradients=self.fresh_gradients, first_step=first, block=block
        )
        self._run(ops, builder, self.batch)
        peak = ledger.take_peak()
        del held
        return peak

    def _run(self, ops: Ops, builder: Builder, batch: Batch, reference_ops: Ops | None = None) -> None:
        """One micro-step of the run's stage; without gradients where `ops` makes none.

        A reference model runs with `reference_ops` where it has hooks of its own.
        """
        model, stage, reference_ops = builder.model(batch), self.run.stage, reference_ops or ops
        if stage in ("pt", "sft"):
            one = step.language_model_step if ops.grad_enabled else step.evaluation_step
            one(ops, model, batch.tokens)
        elif stage == "rm":
            preference.reward_step(ops, model, builder.value_head(), batch.tokens)
        else:
            reference = self._reference(reference_ops, batch) if preference.needs_reference(self.run) else None
            pair = preference.Pair(policy=model, reference=reference, reference_ops=reference_ops)
            (preference.dpo_step if stage == "dpo" else preference.kto_step)(ops, pair, batch.tokens)

    def _reference(self, ops: Ops, batch: Batch) -> step.Model:
        """What the trained model is compared with: a second model, or its own base behind adapters that do nothing."""
        bypassed = not preference.loads_reference(self.run)
        return Builder(self.run, self.shape, ops, fresh_gradients=False, bypassed=bypassed).base_model(batch)

    def evaluate(self) -> int:
        """Peak of an evaluation step, or 0 where the run evaluates nothing."""
        if not evaluates(self.run):
            return 0
        ledger, held = self.ledger(gradients=False)
        held.append(Storage(ledger, self.fetched, "activations"))
        ops = Ops(ledger, autocast_dtype=self.precision.autocast)
        batch = evaluation_batch(self.run, self.shape.vision, self.eval_length, self.images)
        builder = Builder(self.run, self.shape, ops, fresh_gradients=True)
        with ops.no_grad():
            if self.run.predict_with_generate:
                answers = batch.sequences * self.run.max_new_tokens
                cache = ops.empty(inference.cache_numel(self.shape, batch.tokens + answers), self.precision.compute)
                inference.generation_step(ops, builder.model(batch), batch)
                del cache
            else:
                self._run(ops, builder, batch)
        del held
        return ledger.take_peak()[0]

    def phases(self) -> tuple[dict[str, int], dict[str, int]]:
        """Peak of every phase, and the split of the largest of load, forward and backward, and step."""
        resting = self.weights + self.reference + self.adapters + self.buckets + self.optimizer.masters
        busy, split = self.forward_backward()
        workspace = 2 * cublas_workspace(self.card.compute_capability)
        between = resting + self.optimizer.states + workspace + self.fetched
        stepping = between + self.gradients + self.optimizer.step
        phases = {
            "load": max(resting, resting - self.buckets + self._sync_bytes()),
            "forward_backward": busy,
            "optimizer_step": stepping,
            "save": between,
            "evaluate": self.evaluate(),
        }
        if stepping > busy:
            split = dict.fromkeys(COMPONENTS, 0) | {
                "weights": self.weights + self.reference,
                "adapters": self.adapters,
                "gradients": self.gradients,
                "optimizer": self.optimizer.masters + self.optimizer.states,
                "activations": self.fetched,
                "buffers": self.buckets + workspace + self.optimizer.step,
            }
        if phases["load"] > sum(split.values()):
            held = {"weights": self.weights + self.reference, "adapters": self.adapters}
            held["optimizer"] = self.optimizer.masters
            split = dict.fromkeys(COMPONENTS, 0) | held | {"buffers": phases["load"] - sum(held.values())}
        return phases, split

    def _sync_bytes(self) -> int:
        """What DistributedDataParallel takes while it makes all ranks alike, before it has its buckets."""
        if self.ranks.world == 1:
            return 0
        kind, loaded, trained = quantization(self.run, self.shape), self.precision.loaded, self.precision.trained
        tensors = []
        for parameter in in_order(self.run, self.shape):
            if kind is not None and parameter.key[1] in parameters.layer_linears(self.shape):
                tensors.append((dtypes.INT8, parameter.numel * kind.bits // 8))
            else:
                dtype = trained if parameter.trained else loaded
                tensors.append((dtype, parameter.numel * dtypes.size(dtype)))
        return ddp_sync_bytes(tensors, self.block)

    def host(self, split: Mapping[str, int]) -> HostNeed:
        """Main memory of all processes here; only the first one saves."""
        inputs = self.shape.num_layers * self.batch.tokens * self.shape.hidden_size
        processes = [
            host_bytes(
                self.run,
                trained=self.gradients if saves else 0,
                num_trained=self.gradients // dtypes.size(self.precision.trained),
                weights=self.weights if saves else 0,
                inputs=inputs * dtypes.size(self.precision.loaded),
                peak=sum(split.values()),
                together=self.ranks.world > 1,
            )
            for saves in (False, True)
        ]
        training = processes[0] * self.ranks.local
        return HostNeed(training=training, saving=training - processes[0] + processes[1])

    def mapped(self) -> int:
        """Bytes of the checkpoint's files, which all processes here share while they load."""
        vision = self.shape.vision.numel if self.shape.vision is not None else 0
        return (statics.total(statics.model_groups(self.shape)) + vision) * dtypes.size(dtypes.named(self.shape.dtype))

    @property
    def measured(self) -> bool:
        """Whether runs of this kind were measured; the bounds are wide otherwise."""
        return not any(by_size(self.run, self.shape))

    def result(self) -> MemoryEstimate:
        """All phases."""
        phases, split = self.phases()
        host = self.host(split)
        return bounds(
            phases=phases,
            components=split,
            exact=self.measured,
            card=self.card,
            host=max(host.training, host.saving, preprocessing_bytes(self.run, self.ranks)),
            host_training=host.training,
            host_mapped=0 if self.run.use_cpu else self.mapped() + self.ranks.local * PROCESS_BYTES,
            nccl=NCCL_BYTES if self.ranks.world > 1 and not self.run.use_cpu else 0,
            tokens=self.batch.tokens * self.run.gradient_accumulation_steps,
            remarks=tuple(self.remarks()),
        )

    def remarks(self) -> Iterator[str]:
        """What else is to be said."""
        yield from remarks(self.run, self.shape, self.batch, self.images)
        yield from by_size(self.run, self.shape)
        yield from host_remarks(self.run)


def split_of(load: int, busy: Mark, stepping: Mark) -> dict[str, int]:
    """The split of the largest of load, forward and backward, and step, where all that loads are weights."""
    size, split = max(busy, stepping, key=mark_bytes)
    return dict.fromkeys(COMPONENTS, 0) | {"weights": load} if load > size else split


def evaluates(run: RunDescription) -> bool:
    """Whether the run has an evaluation set and looks at it."""
    has_data = bool(run.eval_dataset) or run.val_size > 0
    return has_data and (run.do_eval or run.eval_strategy != "no")
