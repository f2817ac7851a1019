"""Runs under FSDP that have no formula."""

from __future__ import annotations

from collections.abc import Iterator

from llamafactory_preflight.memory.layers.checkpointing import checkpointing_kind
from llamafactory_preflight.memory.optimizers import TORCH_ADAMW
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.fsdp import FsdpPlan
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


def reasons(run: RunDescription, plan: FsdpPlan, shape: ModelShape, software: Software) -> Iterator[str]:
    """One sentence for every path of the run that has no formula."""
    if plan.unmodelled:
        yield f"What {', '.join(f'`{name}`' for name in plan.unmodelled)} does to memory has no formula yet"
    if not (run.bf16 or plan.precision == "bf16") or run.fp16 or run.pure_bf16 or plan.precision == "fp16":
        yield "FSDP without bf16 mixed precision has no formula yet"
    if dtypes.named(shape.dtype) != BFLOAT16:
        yield "FSDP with a checkpoint that is not in bfloat16 has no formula yet"
    if run.stage not in ("pt", "sft") or run.predict_with_generate:
        yield f"Stage `{run.stage}` or generation under FSDP has no formula yet"
    if run.finetuning_type not in ("full", "lora") or run.use_dora or run.additional_target:
        yield "FSDP has a formula for full tuning and plain LoRA only"
    if shape.vision is not None or shape.moe is not None:
        yield "Experts and vision models under FSDP have no formula yet"
    if run.upcast_layernorm or run.upcast_lmhead_output:
        yield "`upcast_layernorm` and `upcast_lmhead_output` under FSDP have no formula yet"
    if (run.optim or "adamw_torch") not in TORCH_ADAMW or run.use_galore or run.use_apollo or run.use_muon:
        yield f"Optimizer `{run.optim}` under FSDP has no formula yet"
    if not software.at_least("transformers", 5):
        yield "FSDP under transformers 4 has no formula yet"
    kind = quantization(run, shape)
    if kind is not None and (plan.version == 2 or plan.offloads or (kind.method, kind.bits) != ("bnb", 4)):
        yield "Quantized weights under FSDP have a formula for version 1 and 4 bit of bitsandbytes only"
    if plan.version == 2 and (not plan.launched or checkpointing_kind(run) in ("host", "reentrant")):
        yield "FSDP 2 with reentrant checkpointing has no formula yet: LLaMA-Factory leaves it under accelerate launch"
