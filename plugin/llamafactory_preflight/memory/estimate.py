"""Puts the parts together: components of every phase, their maximum, and honest bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import dtypes, optimizers, preference, statics, step
from llamafactory_preflight.memory.batch import Batch, evaluation_batch, training_batch
from llamafactory_preflight.memory.build import ADAPTERS, Builder
from llamafactory_preflight.memory.ops import Ops
from llamafactory_preflight.memory.paper import COMPONENTS, Ledger, Storage
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


PHASES = ("load", "forward_backward", "optimizer_step", "save", "evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the estimate depends on of the card and its allocator.

    Attributes:
        compute_capability: Decides the size of cuBLAS' workspaces.
        expandable_segments: Whether PYTORCH_CUDA_ALLOC_CONF asks for them.
    """

    compute_capability: tuple[int, int] = (8, 0)
    expandable_segments: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Predicted bytes on one GPU.

    Attributes:
        phases: Allocated peak of each of `PHASES`, as `torch.cuda.max_memory_allocated` counts it.
        components: Bytes of each of `COMPONENTS` at the peak; they add up to `peak_allocated_bytes`.
        peak_allocated_bytes: The largest of load, forward_backward and optimizer_step.
        low_bytes: The peak will hardly be below this.
        high_bytes: The peak will hardly be above this.
        slack_bytes: What the caching allocator needs beyond the allocated peak under a tight cap.
        host_bytes: Resident memory of the process at its peak.
        tokens_per_step: Tokens of one optimizer step on one GPU, padding included.
        reasons: One sentence for each value that was inferred rather than given.
    """

    phases: Mapping[str, int]
    components: Mapping[str, int]
    peak_allocated_bytes: int
    low_bytes: int
    high_bytes: int
    slack_bytes: int
    host_bytes: int
    tokens_per_step: int
    reasons: tuple[str, ...]


_RELATIVE_ERROR = 0.012
"""Half the width of the bounds: no measured run of a modelled kind lies outside (tests/measured/README)."""
_ABSOLUTE_ERROR = 32 * 2**20
_SLACK = 96 * 2**20
"""Reserved beyond allocated in the tightest capped runs with expandable segments (64 MiB measured)."""
_FRAGMENTS = 0.02
"""Without expandable segments: a run of 15.63 GiB fails under 15.8 and runs under 16.3 (2 % more)."""
_PROCESS_HOST_BYTES = int(2.2 * 2**30)
"""Resident memory of a process with torch, CUDA and transformers loaded (0.6B LoRA runs: 2.2 GiB)."""


def unmodelled_paths(run: RunDescription) -> list[str]:
    """Names of the settings that put a run on a path without a formula."""
    names = (
        "use_unsloth", "use_kt", "fp8", "use_mca", "use_hyper_parallel", "use_v1_kernels", "mixture_of_depths",
        "torch_compile", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "shift_attn", "resize_vocab",
        "use_llama_pro", "fsdp",
    )  # fmt: skip
    return [name for name in names if getattr(run, name)]


def estimate(
    run: RunDescription, shape: ModelShape, *, software: Software, card: Card | None = None, length: int | None = None
) -> MemoryEstimate:
    """Predicts one GPU's memory for a run.

    Args:
        run: The run.
        shape: The model.
        software: Installed versions: the default optimizer and the layout of experts depend on them.
        card: The card; by default an Ampere one with expandable segments.
        length: Tokens of the longest sample, if it is known to be shorter than the cutoff.

    Raises:
        Unmodelled: The run takes a path that no formula here covers.
    """
    _refuse(run, shape, software)
    return _Estimator(run, shape, software, card or Card(), length).result()


def _refuse(run: RunDescription, shape: ModelShape, software: Software) -> None:
    paths = unmodelled_paths(run)
    if paths:
        raise Unmodelled(f"Runs with {', '.join(f'`{name}`' for name in paths)} have no formula yet")
    if run.deepspeed is not None:
        raise Unmodelled("What DeepSpeed shards and moves to the host has no formula yet")
    if shape.vision is not None and not (run.freeze_vision_tower and run.freeze_multi_modal_projector):
        raise Unmodelled("Training the vision tower or the projector has no formula yet")
    if shape.vision is not None and run.freeze_language_model:
        raise Unmodelled("Training a vision model without its language model has no formula yet")
    if run.stage == "ppo":
        raise Unmodelled("PPO has no formula yet: it samples answers of a length that is not known beforehand")
    if run.label_smoothing_factor:
        raise Unmodelled("`label_smoothing_factor` has no formula yet")
    if shape.quantization_method is not None:
        raise Unmodelled(f"Checkpoints quantized by {shape.quantization_method} have no formula yet")
    if shape.moe is not None and not software.at_least("transformers", 5):
        raise Unmodelled("Mixture-of-experts layers of transformers 4 have no formula yet")


class _Estimator:
    """One estimate under way."""

    def __init__(
        self, run: RunDescription, shape: ModelShape, software: Software, card: Card, length: int | None
    ) -> None:
        self.run, self.shape, self.software, self.card = run, shape, software, card
        self.batch = training_batch(run, shape.vision, length)
        self.precision = precision(run, shape)
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

    def _reference_bytes(self) -> int:
        """Weights of a second model: for full and freeze tuning the model itself once more, as it was loaded."""
        needs = self.run.stage == "kto" or (self.run.stage == "dpo" and self.run.pref_loss not in ("orpo", "simpo"))
        if not needs or (self.run.finetuning_type in ADAPTERS and self.run.ref_model is None):
            return 0
        if self.run.ref_model is not None and self.run.ref_model != self.run.model_name_or_path:
            raise Unmodelled("A reference model of another name has no formula yet")
        return statics.total(statics.model_groups(self.shape)) * dtypes.size(self.precision.loaded)

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
            "optimizer": self.optimizer.states if states else 0,
            "gradients": self.gradients if gradients else 0,
            "buffers": 2 * cublas_workspace(self.card.compute_capability),
        }
        return ledger, [Storage(ledger, size, name) for name, size in held.items()]

    def forward_backward(self) -> tuple[int, dict[str, int]]:
        """Peak over the micro-steps of all steps, and its split.

        From the second step on optimizer states exist; the first is higher only where it tunes kernels.
        """
        steady = self._micro_step(first=False)
        tunes = self.shape.moe is not None and self.run.enable_liger_kernel
        return max(steady, self._micro_step(first=True), key=lambda peak: peak[0]) if tunes else steady

    def _micro_step(self, *, first: bool) -> tuple[int, dict[str, int]]:
        ledger, held = self.ledger(gradients=not self.fresh_gradients, states=not first)
        ops = Ops(ledger, autocast_dtype=self.precision.autocast)
        builder = Builder(self.run, self.shape, ops, fresh_gradients=self.fresh_gradients, first_step=first)
        model = builder.model(self.batch)
        tokens = self.batch.tokens
        if self.run.stage in ("pt", "sft"):
            step.language_model_step(ops, model, tokens)
        elif self.run.stage == "rm":
            preference.reward_step(ops, model, builder.value_head(), tokens)
        else:
            reference = None if self.run.pref_loss in ("orpo", "simpo") else builder.reference_model(self.batch)
            pair = preference.Pair(policy=model, reference=reference)
            (preference.dpo_step if self.run.stage == "dpo" else preference.kto_step)(ops, pair, tokens)
        peak = ledger.take_peak()
        del held
        return peak

    def evaluate(self) -> int:
        """Peak of an evaluation step, or 0 where the run evaluates nothing."""
        if not evaluates(self.run) or self.run.stage not in ("pt", "sft"):
            return 0
        ledger, held = self.ledger(gradients=False)
        ops = Ops(ledger, autocast_dtype=self.precision.autocast)
        batch = evaluation_batch(self.run, self.shape.vision)
        model = Builder(self.run, self.shape, ops, fresh_gradients=True).model(batch)
        step.evaluation_step(ops, model, batch.tokens)
        del held
        return ledger.take_peak()[0]

    def result(self) -> MemoryEstimate:
        """All phases."""
        resting = self.weights + self.reference + self.adapters
        busy, split = self.forward_backward()
        workspace = 2 * cublas_workspace(self.card.compute_capability)
        stepping = resting + self.optimizer.states + self.gradients + self.optimizer.step + workspace
        phases = {
            "load": resting,
            "forward_backward": busy,
            "optimizer_step": stepping,
            "save": resting + self.optimizer.states + workspace,
            "evaluate": self.evaluate(),
        }
        if stepping > busy:
            split = dict.fromkeys(COMPONENTS, 0) | {
                "weights": self.weights + self.reference,
                "adapters": self.adapters,
                "gradients": self.gradients,
                "optimizer": self.optimizer.states,
                "buffers": workspace + self.optimizer.step,
            }
        peak = sum(split.values())
        error = int(peak * _RELATIVE_ERROR) + _ABSOLUTE_ERROR
        slack = _SLACK if self.card.expandable_segments else _SLACK + int(peak * _FRAGMENTS)
        return MemoryEstimate(
            phases=phases,
            components=split,
            peak_allocated_bytes=peak,
            low_bytes=peak - error,
            high_bytes=peak + error,
            slack_bytes=slack,
            host_bytes=_PROCESS_HOST_BYTES + self.weights,
            tokens_per_step=self.batch.tokens * self.run.gradient_accumulation_steps,
            reasons=tuple(reasons(self.run, self.shape, self.batch)),
        )


def cublas_workspace(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace; the forward's and the backward's thread have one each.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    return 32 * 2**20 if compute_capability[0] in (9, 10) else 4096 * 2 * 1024 + 16 * 8 * 1024


def evaluates(run: RunDescription) -> bool:
    """Whether the run has an evaluation set and looks at it."""
    has_data = bool(run.eval_dataset) or run.val_size > 0
    return has_data and (run.do_eval or run.eval_strategy != "no")


def reasons(run: RunDescription, shape: ModelShape, batch: Batch) -> list[str]:
    """One sentence for each inferred value."""
    words = [f"A micro-batch is {batch.sequences} x {batch.length} tokens, the longest that the arguments allow."]
    if run.gradient_checkpointing and run.disable_gradient_checkpointing:
        words.append("`gradient_checkpointing: true` makes the Trainer checkpoint although it is disabled elsewhere.")
    if run.enable_liger_kernel and not shape.family.liger:
        words.append(f"LLaMA-Factory has no liger kernels for {shape.model_type}: the logits are written out.")
    if shape.vision is not None:
        words.append("This is for text alone: images add their tokens and the vision tower's activations.")
    return words
