"""A RunDescription as the argument objects that LLaMA-Factory's own functions take."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import torch

from llamafactory_preflight.run import RunDescription


def compute_dtype(run: RunDescription) -> torch.dtype | None:
    """What LLaMA-Factory's parser makes of the precision flags."""
    if run.bf16 or run.pure_bf16:
        return torch.bfloat16
    return torch.float16 if run.fp16 else None


def _fields_for(kind: Any, run: RunDescription) -> dict[str, Any]:
    given = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    values = {name: ",".join(value) or None if isinstance(value, tuple) else value for name, value in given.items()}
    return {name: value for name, value in values.items() if name in names}


def model_arguments(run: RunDescription) -> Any:
    """Returns LLaMA-Factory's ModelArguments with what its parser derives from the other groups."""
    from llamafactory.hparams import ModelArguments

    fields = _fields_for(ModelArguments, run) | {"model_name_or_path": run.model_name_or_path or "model"}
    arguments = ModelArguments(**fields)
    arguments.compute_dtype = compute_dtype(run)
    arguments.model_max_length = run.cutoff_len
    arguments.block_diag_attn = run.neat_packing
    return arguments


def finetuning_arguments(run: RunDescription) -> Any:
    """Returns LLaMA-Factory's FinetuningArguments."""
    from llamafactory.hparams import FinetuningArguments

    return FinetuningArguments(**_fields_for(FinetuningArguments, run))


def training_arguments(run: RunDescription, output_dir: str) -> Any:
    """Returns the Trainer's arguments as far as the choice of an optimizer needs them."""
    from transformers import TrainingArguments

    optim: dict[str, Any] = {"optim": run.optim} if run.optim else {}
    with contextlib.redirect_stderr(io.StringIO()):
        return TrainingArguments(output_dir=output_dir, use_cpu=True, report_to="none", **optim)
