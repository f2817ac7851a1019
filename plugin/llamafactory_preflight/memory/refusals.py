"""Paths without a formula: each one is named, none is guessed at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import badam, fsdp_refusals, preference
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.parameters import expert_linears, lora_targets
from llamafactory_preflight.memory.quantization import Quantized, quantization
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


OTHER_CODE = (
    "use_unsloth", "use_kt", "fp8", "use_mca", "use_hyper_parallel", "use_v1_kernels", "mixture_of_depths",
    "torch_compile", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "shift_attn", "resize_vocab", "use_llama_pro",
)  # fmt: skip
"""Settings that put a run on code that no formula here follows."""


def refuse(run: RunDescription, shape: ModelShape, software: Software, images: Images | None = None) -> None:
    """Raises for the first path without a formula.

    Raises:
        Unmodelled: There is one.
    """
    for reason in reasons(run, shape, software):
        raise Unmodelled(reason)
    if images is not None:
        for reason in _with_images(run, shape, software):
            raise Unmodelled(reason)


def reasons(run: RunDescription, shape: ModelShape, software: Software) -> Iterator[str]:
    """One sentence for every path of the run that has no formula."""
    yield from other_code(run)
    if run.deepspeed is not None:
        yield from _deepspeed(run, run.deepspeed, shape)
    elif run.fsdp_plan is not None:
        yield from fsdp_refusals.reasons(run, run.fsdp_plan, shape, software)
    if run.use_badam:
        yield from badam.reasons(run, shape)
    if run.stage == "ppo":
        yield "PPO has no formula yet: it samples answers of a length that is not known beforehand"
    if run.label_smoothing_factor and (run.deepspeed or run.fsdp_plan or shape.vision):
        yield "`label_smoothing_factor` has no formula yet for vision models and under DeepSpeed or FSDP"
    if run.pref_ftx and run.stage == "dpo":
        yield "`pref_ftx` has no formula yet"
    if run.stage == "dpo" and run.ref_model not in (None, run.model_name_or_path):
        yield "A reference model of another name has no formula yet"
    if quantization(run, shape) is not None and run.finetuning_type not in ADAPTERS:
        yield "Quantized weights are not trained themselves, only adapters on them"
    if shape.moe is not None and software.transformers is None:
        yield "Which transformers is installed decides what a mixture of experts takes, and none is"
    if shape.moe is not None and shape.vision is not None and not software.at_least("transformers", 5):
        yield "Vision models with experts have no formula under transformers 4 yet"
    yield from _listed_experts(run, shape.under(software))
    if shape.moe is not None and run.finetuning_type == "oft":
        yield "OFT on a mixture-of-experts model has no formula yet"
    if shape.vision is not None:
        yield from _vision(run)


def other_code(run: RunDescription) -> Iterator[str]:
    """What no run, no chat and no export is predicted with."""
    names = [f"`{name}`" for name in OTHER_CODE if getattr(run, name)]
    if names:
        yield phrase("Runs with {names} have no formula yet", names=", ".join(names))
    if run.unmodelled:
        quoted = ", ".join(f"`{name}`" for name in run.unmodelled)
        yield phrase("What {names} does to memory has no formula", names=quoted)


def _listed_experts(run: RunDescription, shape: ModelShape) -> Iterator[str]:
    """LLaMA-Factory looks for `.46.` within names to train layer 46, and finds the 46th expert of every layer too."""
    if shape.moe is None or shape.moe.stacked:
        return
    in_experts = {"all", *expert_linears(shape)} & set(run.freeze_trainable_modules)
    if run.finetuning_type == "freeze" and in_experts:
        yield (
            "Under transformers 4, freeze tuning also trains the experts of all layers that have a trained layer's "
            "number, which has no formula yet: name `mlp` and `self_attn` in freeze_trainable_modules"
        )
    if run.use_dora and lora_targets(run, shape).keys() & expert_linears(shape).keys():
        yield "DoRA on a list of experts has no formula yet"


def _vision(run: RunDescription) -> Iterator[str]:
    if not (run.freeze_vision_tower and run.freeze_multi_modal_projector):
        yield "Training the vision tower or the projector has no formula yet"
    if run.freeze_language_model:
        yield "Training a vision model without its language model has no formula yet"
    if run.neat_packing:
        yield "Neat packing of a vision model has no formula yet"


def _deepspeed(run: RunDescription, config: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    plan = ZeroPlan.from_config(config, hidden_size=shape.hidden_size)
    if plan.unmodelled:
        names = ", ".join(f"`{name}`" for name in plan.unmodelled)
        yield phrase("What {names} in the DeepSpeed JSON does to memory has no formula yet", names=names)
    if plan.swaps and quantization(run, shape) is not None:
        yield "Quantized weights with offloading to NVMe have no formula yet"
    if plan.offload_param == "nvme" and preference.loads_reference(run):
        yield "DeepSpeed fails with a second model and parameters on an NVMe: it removes the files of the first one"
    if plan.precision == "fp32" or (plan.precision == "auto" and not (run.bf16 or run.fp16)):
        yield "DeepSpeed in float32 has no formula yet"
    if run.stage in ("dpo", "kto") and plan.stage == 3 and run.additional_target:
        yield "`additional_target` in a preference stage under ZeRO-3 has no formula yet"
    if run.stage == "rm" and plan.stage < 3 and _trains_head(run) and not shape.tie_word_embeddings:
        yield "A reward model whose language head is trained and gets no gradient has no formula below ZeRO-3 yet"
    if run.finetuning_type == "oft" or run.use_dora:
        yield "OFT and DoRA under DeepSpeed have no formula yet"
    if shape.vision is not None and plan.stage == 3:
        yield "A vision model under ZeRO-3 has no formula yet"
    if plan.stage == 3 and shape.moe is not None:
        if run.finetuning_type in ("full", "freeze"):
            yield "Training experts under ZeRO-3 has no formula yet, only adapters beside them"
        if preference.loads_reference(run):
            yield "A second model with experts under ZeRO-3 has no formula yet"
    kind = quantization(run, shape)
    if plan.stage == 3 and kind is not None:
        yield from _shared_bits(run, shape, kind)


def _shared_bits(run: RunDescription, shape: ModelShape, kind: Quantized) -> Iterator[str]:
    """What quantized weights have no formula under ZeRO-3."""
    if shape.quantization_method or kind.method != "bnb" or kind.bits != 4:
        yield "Under ZeRO-3 LLaMA-Factory takes quantized weights only if it makes them 4 bit with bitsandbytes itself"
    if run.stage not in ("pt", "sft") or shape.moe is not None:
        yield "4 bit under ZeRO-3 has a formula in the stages pt and sft and without experts only"


def _trains_head(run: RunDescription) -> bool:
    extra = run.freeze_extra_modules if run.finetuning_type == "freeze" else run.additional_target
    return run.finetuning_type == "full" or "lm_head" in extra


def _with_images(run: RunDescription, shape: ModelShape, software: Software) -> Iterator[str]:
    if not software.at_least("transformers", 5):
        yield "Images under transformers 4 have no formula yet"
    if shape.vision is None or shape.vision.tower is None:
        yield phrase("What images take in {model_type} has no formula yet", model_type=shape.model_type)
    if run.stage != "sft":
        yield phrase("Images in stage `{stage}` have no formula yet", stage=run.stage)
    if run.packing:
        yield "Packed samples with images have no formula yet"
    if run.predict_with_generate:
        yield "Answers to images have no formula yet"
    if run.gradient_checkpointing and run.disable_gradient_checkpointing:
        yield "What the Trainer's own gradient checkpointing does in a vision tower has no formula yet"
