"""Settings that do not go together: LLaMA-Factory, transformers or DeepSpeed refuse them, most after the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamafactory_preflight.errors import Refused, UserError
from llamafactory_preflight.memory.quantization import BROUGHT_BACK
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


def refuse(run: RunDescription, *, serves: bool = False) -> None:
    """Raises for the first contradiction among the arguments; a chat or an export reads none of those.

    Raises:
        UserError: There is one.
    """
    for problem in () if serves else (*_method(run), *_precision(run), *_sharding(run)):
        raise problem


def refuse_model(run: RunDescription, shape: ModelShape, *, serves: bool = False) -> None:
    """Raises where the DeepSpeed JSON has faults for this model, or its checkpoint does not go with how it is shared.

    Source: model/model_utils/quantization.py.

    Raises:
        UserError: Something is wrong.
    """
    if run.deepspeed is not None:
        ZeroPlan.from_config(run.deepspeed, hidden_size=shape.hidden_size)
    method, sharder = shape.quantization_method, None if serves else _sharder(run)
    if sharder and method is not None and method not in BROUGHT_BACK:
        raise UserError(
            phrase(
                "LLaMA-Factory refuses {sharder} for a checkpoint that is quantized already ({method})",
                sharder=sharder,
                method=method,
            ),
            where="model_name_or_path",
            next_step="Take the unquantized checkpoint, with `quantization_bit: 4` if it has to be small",
        )


def _method(run: RunDescription) -> Iterator[UserError]:
    """LLaMA-Factory's parser: hparams/finetuning_args.py."""
    others = [name for name in ("use_galore", "use_apollo", "use_badam") if getattr(run, name)]
    if run.finetuning_type == "lora" and others:
        yield Refused(
            phrase("LLaMA-Factory refuses `{name}` with `finetuning_type: lora`", name=others[0]),
            next_step=phrase("Set finetuning_type=full, or remove `{name}`", name=others[0]),
        )
    if run.finetuning_type != "lora" and run.loraplus_lr_ratio is not None:
        yield Refused(
            phrase(
                "LLaMA-Factory refuses `loraplus_lr_ratio` with `finetuning_type: {kind}`", kind=run.finetuning_type
            ),
            next_step="Remove it: LoRA+ is for LoRA alone",
        )


def _precision(run: RunDescription) -> Iterator[UserError]:
    """transformers: training_args.py (_validate_args) and integrations/deepspeed.py (trainer_config_finalize)."""
    if run.bf16 and run.fp16:
        yield UserError("`bf16` and `fp16` are both true, and transformers takes one at most", next_step="Remove one")
    for name, full_eval in (("bf16", run.bf16_full_eval), ("fp16", run.fp16_full_eval)):
        asked = getattr(run, name) or full_eval
        written = _enabled(run.deepspeed, name)
        if written is not None and written != "auto" and bool(written) is not asked:
            yield UserError(
                phrase(
                    "The DeepSpeed JSON has `{name}.enabled: {written}` and the arguments have `{name}: {asked}`, "
                    "which transformers refuses once the weights are loaded",
                    name=name,
                    written=str(written).lower(),
                    asked=str(asked).lower(),
                ),
                where="deepspeed",
                next_step=phrase(
                    'Write "auto" there, or set {name}={value}', name=name, value=str(bool(written)).lower()
                ),
            )
    if run.pure_bf16 and _stage(run.deepspeed) == 3:
        yield UserError("LLaMA-Factory refuses `pure_bf16` under ZeRO-3", next_step="Take `bf16: true` instead")


def _sharding(run: RunDescription) -> Iterator[UserError]:
    if run.fsdp and run.deepspeed is not None:
        yield UserError(
            "`fsdp` and `deepspeed` are both set, and transformers takes one at most", next_step="Remove one"
        )
    sharder = _sharder(run)
    if (
        sharder
        and run.quantization_bit is not None
        and not (run.quantization_method == "bnb" and run.quantization_bit == 4)
    ):
        kind = f"`quantization_method: {run.quantization_method}` with `quantization_bit: {run.quantization_bit}`"
        what = phrase("LLaMA-Factory refuses {kind} under {sharder}", kind=kind, sharder=sharder)
        yield UserError(what, next_step="Take bnb with 4 bit, or ZeRO-2")


def _sharder(run: RunDescription) -> str | None:
    """What cuts whole parameters, as LLaMA-Factory sees it while it loads the model."""
    if _stage(run.deepspeed) == 3:
        return "ZeRO-3"
    plan = run.fsdp_plan
    return "FSDP" if plan is not None and plan.launched and plan.loads_once else None


def _stage(config: Mapping[str, Any] | None) -> Any:
    section = (config or {}).get("zero_optimization")
    return section.get("stage", 0) if isinstance(section, Mapping) else 0


def _enabled(config: Mapping[str, Any] | None, name: str) -> Any:
    section = (config or {}).get(name)
    return section.get("enabled") if isinstance(section, Mapping) else None
