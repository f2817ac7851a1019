"""Measures the true peak memory of your own YAML on your own card, with the prediction beside it.

usage: python scripts/measure_peak.py A.yaml [key=value ...] [--steps 3] [--share]

No weights are downloaded: a checkpoint of zeros in the model's real shapes takes their place, which memory does not
notice, and every sample is as long as `cutoff_len`. It takes about a minute. Nothing is saved, evaluated or reported.
`--share` prints one JSON row without paths or names, for the project's table of measured runs. One GPU, no DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import command_line
import measure_runs


SCRIPTS = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 580
# What names files, accounts or places, or decides what is reported and saved: replaced or left out.
LEFT_OUT = {
    "model_name_or_path", "dataset", "eval_dataset", "dataset_dir", "media_dir", "output_dir", "cache_dir",
    "tokenized_path", "resume_from_checkpoint", "run_name", "report_to", "logging_dir", "deepspeed", "val_size",
    "eval_strategy", "eval_steps", "do_eval", "do_predict", "save_steps", "save_strategy", "plot_loss", "max_samples",
    "num_train_epochs", "max_steps", "template", "streaming", "overwrite_output_dir", "adapter_name_or_path",
    "model_revision", "trust_remote_code", "warmup_ratio", "warmup_steps", "logging_steps", "enable_thinking",
    "preprocessing_num_workers", "dataloader_num_workers", "overwrite_cache", "ddp_timeout", "load_best_model_at_end",
    "use_swanlab", "ref_model", "ref_model_adapters", "reward_model", "reward_model_adapters", "adapter_folder",
}  # fmt: skip
OTHERS = ("swanlab_", "wandb_", "trackio_", "hub_", "push_to_hub", "ray_", "export_", "default_system", "project")
SHARED_TEXTS = {
    "stage", "finetuning_type", "optim", "lr_scheduler_type", "flash_attn", "quantization_method", "quantization_type",
    "rope_scaling", "pref_loss", "lora_target", "additional_target", "oft_target", "galore_target", "apollo_target",
    "freeze_trainable_modules", "freeze_extra_modules", "mixture_of_depths", "fp8_backend", "badam_mode",
    "badam_mask_mode", "badam_switch_mode", "torch_compile_backend", "torch_compile_mode",
}  # fmt: skip
"""Arguments whose text bears on memory; any other text may be a name."""
UNSET = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": False}
"""The Trainer's defaults, where `measure_runs` has others."""
SHAPE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_experts_per_tok"),
    "moe_intermediate_size",
)


def case_of(given: dict[str, Any], steps: int) -> dict[str, Any]:
    """The case that `measure_runs` runs in place of a user's run.

    What the user leaves out is as LLaMA-Factory has it, not as the measured rounds of this project do.
    """
    secret = tuple(f"_{word}" for word in ("token", "key", "secret", "url", "id", "path", "dir"))
    args = {
        name: value
        for name, value in given.items()
        if name not in LEFT_OUT and not name.endswith(secret) and not name.startswith(OTHERS)
    }
    return {"id": "mine", "model": "mine", "args": UNSET | args | {"max_steps": steps}}


def measured(case: dict[str, Any], config: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Runs the case in a process of its own and returns its row."""
    measure_runs.claim()
    folder = Path(tempfile.mkdtemp(prefix="measure_peak.", dir=measure_runs.ROOT))
    plan, out, root = folder / "mine.json", folder / "mine.jsonl", folder / "runs"
    plan.write_text(json.dumps({"models": {"mine": config}, "cases": [case]}))
    command = [sys.executable, str(SCRIPTS / "measure_runs.py"), str(plan), str(out), "--jobs", "1"]
    env = env | {measure_runs.ROOT_VARIABLE: str(root)}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if not out.is_file():
        return {
            "ok": False,
            "error": f"the run died, or took longer than {TIMEOUT_SECONDS} s; its log is {root / 'mine.log'}",
        }
    row = dict(json.loads(out.read_text().splitlines()[-1]))
    if row.get("ok"):
        shutil.rmtree(folder)
    return row


def row_to_share(case: dict[str, Any], config: dict[str, Any], row: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What can be published: shapes and figures, no paths and no names."""

    def is_public(name: str, value: Any) -> bool:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return isinstance(value, int | float) or (name in SHARED_TEXTS and not re.search(r"[/\\\s]", text))

    figures = ("ok", "loaded_allocated_gib", "peak_allocated_gib", "peak_reserved_gib", "trainable_params")
    return {
        "shape": {name: config[name] for name in SHAPE if name in config},
        "args": {name: value for name, value in case["args"].items() if is_public(name, value)},
        **{name: row[name] for name in figures if name in row},
        **more,
    }


def main() -> int:
    """Measures one YAML."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("items", nargs="+", metavar="FILE|key=value")
    parser.add_argument("--steps", type=command_line.count, default=3, help="optimizer steps to run")
    parser.add_argument("--share", action="store_true", help="print a row for the project's table")
    options = parser.parse_args()
    with contextlib.suppress(ImportError):
        sys.path.append(str(SCRIPTS.parent / "plugin"))  # where the package is not installed
    from llamafactory_preflight import arguments, device, preflight
    from llamafactory_preflight.errors import Unmodelled, UserError
    from llamafactory_preflight.machine import allocator
    from llamafactory_preflight.model import hub

    try:
        given = arguments.read(options.items)
        cards = device.visible()
        if not cards:
            raise UserError("There is no GPU here to measure on")
        if given.get("deepspeed") or given.get("fsdp"):
            raise UserError("Runs with DeepSpeed or FSDP are not measured here", next_step="Leave `deepspeed` out")
        if not given.get("model_name_or_path"):
            raise UserError("`model_name_or_path` is missing", next_step="Name a model on the hub, or a folder")
        model = hub.find(str(given.get("model_name_or_path")), revision=str(given.get("model_revision", "main")))
        if model.config.get("quantization_config"):
            raise UserError("This checkpoint is quantized already, and zeros cannot take its place")
        env = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        allocator.prefer_expandable_segments(env)
        os.environ.update({name: env[name] for name in allocator.VARIABLES if name in env})
        case, config = case_of(given, options.steps), dict(model.config)
        result = preflight.check(given, overrides=[], device=0)
    except Unmodelled as error:
        print(f"error: {error.reason}.", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    row = measured(case, config, env)
    predicted = result.estimate.peak_allocated_bytes / measure_runs.GIB if result.estimate else None
    if options.share:
        more = {"card": cards[0].name, "predicted_gib": predicted and round(predicted, 4)}
        print(json.dumps(row_to_share(case, config, row, **more, versions=result.software.as_dict())))
        return 0 if row.get("ok") else 1
    if not row.get("ok"):
        fault = str(row.get("out_of_memory") or row.get("error")).strip().splitlines()[-1]
        print(f"It did not get through: {fault}")
    peak = row.get("peak_allocated_gib")
    print(
        f"measured   {peak} GiB allocated, {row.get('peak_reserved_gib')} GiB reserved" if peak else "measured   none"
    )
    print(f"predicted  {predicted:.2f} GiB allocated" if predicted is not None else "predicted  unknown")
    if peak and predicted and row.get("ok"):
        print(f"difference {predicted - peak:+.3f} GiB ({predicted / peak - 1:+.2%})")
    return 0 if row.get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
