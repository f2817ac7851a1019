"""Element types of a run: of the weights as they are loaded, of what is trained, and of the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT16, FLOAT32
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.fsdp import FsdpPlan
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Element types.

    Attributes:
        loaded: Of the weights as they are loaded: the checkpoint's own type, whatever the run computes in.
        compute: What quantized weights are brought back to.
        trained: Of what is trained.
        autocast: The autocast type, or None.
    """

    loaded: int
    compute: int
    trained: int
    autocast: int | None


def precision(run: RunDescription, shape: ModelShape) -> Precision:
    """LLaMA-Factory loads with `torch_dtype="auto"`, and keeps what is trained in float32 but for `pure_bf16`.

    Source: llamafactory/model/{loader,adapter}.py, hparams/parser.py (compute_dtype).
    PEFT makes adapters of a 16-bit model float32 in any case (autocast_adapter_dtype).
    """
    loaded = dtypes.named(shape.dtype)
    if run.deepspeed is not None:
        return _under_deepspeed(run, run.deepspeed, shape)
    if run.fsdp_plan is not None:
        return _under_fsdp(run, run.fsdp_plan)
    autocast = BFLOAT16 if run.bf16 else FLOAT16 if run.fp16 else None
    keeps = (run.pure_bf16 or run.use_badam) and run.finetuning_type in ("full", "freeze")
    compute = autocast or (BFLOAT16 if run.pure_bf16 else loaded)
    return Precision(loaded=loaded, compute=compute, trained=loaded if keeps else FLOAT32, autocast=autocast)


def _under_deepspeed(run: RunDescription, config: Mapping[str, Any], shape: ModelShape) -> Precision:
    """DeepSpeed casts the whole model, adapters too, and runs it without autocast (runtime/engine.py)."""
    half = {"bf16": BFLOAT16, "fp16": FLOAT16, "fp32": FLOAT32}
    asked = ZeroPlan.from_config(config, hidden_size=shape.hidden_size).precision
    if asked == "auto":
        asked = "bf16" if run.bf16 else "fp16" if run.fp16 else "fp32"
    dtype = half[asked]
    return Precision(loaded=dtype, compute=dtype, trained=dtype, autocast=None)


def _under_fsdp(run: RunDescription, plan: FsdpPlan) -> Precision:
    """What a unit computes with once it is gathered: 16 bit, whatever its shards are kept in.

    Version 1 runs under accelerate's autocast. PEFT looks at an adapter's type while it is not gathered, so it casts
    its input to float32, and the unit casts it back as autocast would.
    """
    if plan.version == 2:
        return Precision(loaded=BFLOAT16, compute=BFLOAT16, trained=BFLOAT16, autocast=None)
    trained = BFLOAT16 if run.finetuning_type == "full" else FLOAT32
    return Precision(loaded=BFLOAT16, compute=BFLOAT16, trained=trained, autocast=BFLOAT16)
