"""A complete preset for any model and card, with a comment on what each setting does to memory and speed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamafactory_preflight import report, verdict
from llamafactory_preflight.advice.remedies import as_text
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.result import Result


METHODS = ("lora", "qlora", "full", "freeze")
TEMPLATES = {
    "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl", "qwen2": "qwen",
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "llama": "llama3", "mistral": "mistral", "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}  # fmt: skip
DEFAULT_TEMPLATE = "default"  # until the model's type is known
COMMENTS = {
    "enable_liger_kernel": "faster, and it never holds the logits of a whole batch",
    "quantization_bit": "base weights in 4 bit: a third of the memory, some precision and speed",
    "lora_rank": "adapters, their gradients and optimizer states grow in proportion",
    "lora_target": "every linear layer; attention alone saves next to nothing",
    "dataset": "replace with yours",
    "template": "must be the model's own",
    "enable_thinking": "for data without reasoning; true if your answers begin with a <think> block",
    "cutoff_len": "longest sample in tokens; activations grow in proportion",
    "neat_packing": "fills every sequence with whole samples: no padding, and every step takes the full memory",
    "per_device_train_batch_size": "activations grow in proportion; larger is faster until the card is busy",
    "gradient_accumulation_steps": "more of them: a larger batch in the same memory",
    "disable_gradient_checkpointing": "true is about a quarter faster and keeps the activations of all layers",
    "use_unsloth_gc": "keeps the inputs of all layers in main memory: less of the card, some speed",
    "bf16": "false computes in fp32 and takes twice the activations",
    "optim": "the fused one needs no copies in the step",
    "save_total_limit": "checkpoints kept on disk",
}
SECTIONS = {
    "model": (
        "model_name_or_path",
        "trust_remote_code",
        "quantization_bit",
        "quantization_method",
        "enable_liger_kernel",
    ),
    "method": ("stage", "do_train", "finetuning_type", "lora_rank", "lora_target", "freeze_trainable_layers"),
    "dataset": ("dataset", "dataset_dir", "template", "enable_thinking", "cutoff_len", "neat_packing", "packing"),
    "output": ("output_dir", "overwrite_output_dir", "logging_steps", "save_steps", "save_total_limit", "plot_loss"),
}


def arguments(model: str, method: str) -> dict[str, Any]:
    """Where to begin: a batch of 16 samples of 2048 tokens, one after the other.

    Raises:
        UserError: There is no such method, or the model has no name.
    """
    if not model.strip():
        raise UserError("--model is empty", next_step="Name a model on the hub, or a folder")
    if method not in METHODS:
        raise UserError(f"--method {method} is not known", next_step=f"There are {', '.join(METHODS)}")
    folder = f"saves/{model.rstrip('/').rpartition('/')[2].lower()}/{method}"
    given: dict[str, Any] = {
        "model_name_or_path": model, "trust_remote_code": False, "stage": "sft", "do_train": True,
        "finetuning_type": "lora" if method == "qlora" else method, "dataset": "identity", "dataset_dir": "data",
        "template": DEFAULT_TEMPLATE, "cutoff_len": 2048, "output_dir": folder,
        "overwrite_output_dir": True, "logging_steps": 1, "save_steps": 200, "save_total_limit": 2, "plot_loss": True,
        "report_to": "none", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16,
        "learning_rate": 1.0e-4 if method in ("lora", "qlora") else 1.0e-5, "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    }  # fmt: skip
    if method in ("lora", "qlora"):
        given |= {"lora_rank": 16, "lora_target": "all"}
    if method == "qlora":
        given |= {"quantization_bit": 4}
    return given


def text(result: Result, given: Mapping[str, Any]) -> str:
    """The YAML of a run that was looked at."""
    assert result.estimate is not None and result.device is not None and result.shape is not None
    template = given["template"]
    if template == DEFAULT_TEMPLATE:
        template = TEMPLATES.get(result.shape.model_type, template)
    if template == "qwen3" and re.search("instruct|coder", str(given["model_name_or_path"]), re.IGNORECASE):
        template = "qwen3_nothink"  # these never think
    values = {**given, "template": template}
    if template == "qwen3" and "thinking" not in str(given["model_name_or_path"]).lower():
        values.setdefault("enable_thinking", False)
    needed = verdict.needed_bytes(result.estimate, context_bytes=result.device.context_bytes)
    lines = [
        f"# {given['finetuning_type']} of {given['model_name_or_path']} for {result.device.name}: predicted to need "
        f"{report.size(needed)} of {report.size(result.device.free_bytes)}.",
        "# Check it against your own data: llamafactory-cli preflight THIS_FILE",
    ]
    done: set[str] = set()
    for section, names in SECTIONS.items():
        lines += ["", f"### {section}", *(_line(name, values[name]) for name in names if name in values)]
        done |= set(names)
    lines += ["", "### train", *(_line(name, value) for name, value in values.items() if name not in done)]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    shown = f"{value:.1e}" if name == "learning_rate" else as_text(value)
    return f"{name}: {shown}" + (f"  # {COMMENTS[name]}" if name in COMMENTS else "")
