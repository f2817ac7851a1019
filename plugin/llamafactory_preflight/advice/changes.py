"""Every change to a run that may save memory, what it costs, and where LLaMA-Factory takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from llamafactory_preflight.model.shape import FAMILIES
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


CUTOFF_STEP = 256
CUTOFF_RATIO = 0.95  # above some thousand tokens a step of 256 makes no difference
SHORTEST_CUTOFF = 256


class DeepSpeedFile(dict[str, Any]):
    """A DeepSpeed configuration of ours, which is set by the path that it is found under."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.path = path


def deepspeed_files(pack: Path | None) -> tuple[DeepSpeedFile, ...]:
    """The pack's DeepSpeed files as far as they are there, the least costly first."""
    names = [f"deepspeed_configs/{name}.json" for name in ("zero2", "zero3", "zero2_offload", "zero3_offload")]
    found = [name for name in names if pack is not None and (pack / name).is_file()]
    return tuple(DeepSpeedFile(name, json.loads((Path(str(pack)) / name).read_text())) for name in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A candidate: what it sets and what it costs; `free` changes cost nothing and go with every remedy."""

    set: Mapping[str, Any]
    costs: str
    free: bool = False


def changes(
    run: RunDescription,
    model_type: str,
    *,
    software: Software,
    shards: Sequence[DeepSpeedFile] = (),
    has_bf16: bool = True,
) -> Iterator[Change]:
    """Every change that applies to a run, ordered by its cost: nothing, speed, precision, what is learnt from.

    Those of one argument follow each other, the mildest first.
    """
    adapters = run.finetuning_type in ("lora", "oft")
    family = FAMILIES.get(model_type)
    if not run.enable_liger_kernel and family is not None and family.liger and software.liger_kernel is not None:
        yield Change(set={"enable_liger_kernel": True}, costs="nothing, it is faster", free=True)
    if run.optim == "adamw_torch" and _plain_adamw(run) and software.at_least("torch", 2, 8):
        yield Change(set={"optim": "adamw_torch_fused"}, costs="nothing, it is faster", free=True)
    if _evaluates(run) and run.per_device_eval_batch_size > 1:
        yield Change(set={"per_device_eval_batch_size": 1}, costs="a slower evaluation")
    if run.disable_gradient_checkpointing and not run.gradient_checkpointing:
        yield Change(set={"disable_gradient_checkpointing": False}, costs="about a third more time a step")
    for batch in _smaller_divisors(run.per_device_train_batch_size):
        accumulation = run.gradient_accumulation_steps * run.per_device_train_batch_size // batch
        yield Change(
            set={"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation},
            costs="some speed; the effective batch stays",
        )
    if not run.use_unsloth_gc and not run.disable_gradient_checkpointing:
        yield Change(set={"use_unsloth_gc": True}, costs="some speed and main memory")
    yield from sharding(run, shards)
    if run.finetuning_type in ("full", "freeze") and _plain_adamw(run) and software.bitsandbytes and not run.deepspeed:
        yield Change(set={"optim": "paged_adamw_8bit"}, costs="some speed; 8-bit optimizer states in main memory")
    masters = run.finetuning_type in ("full", "freeze") and not run.use_badam
    if masters and run.bf16 and has_bf16 and run.deepspeed is None:
        yield Change(set={"bf16": False, "pure_bf16": True}, costs="precision: no float32 master weights")
    if adapters and run.quantization_bit is None and _may_quantize(run) and software.bitsandbytes is not None:
        yield Change(set={"quantization_bit": 4}, costs="some precision and speed: base weights in 4 bit")
    if run.finetuning_type == "full" and run.stage in ("pt", "sft", "dpo", "kto", "rm"):
        own = {"use_badam": False} if run.use_badam else {}  # LLaMA-Factory takes no adapters with it
        yield Change(set={"finetuning_type": "lora"} | own, costs="another method: adapters instead of all weights")
    cutoff = run.cutoff_len
    while cutoff > SHORTEST_CUTOFF:
        cutoff = min(cutoff - 1, int(cutoff * CUTOFF_RATIO)) // CUTOFF_STEP * CUTOFF_STEP
        yield Change(set={"cutoff_len": max(cutoff, SHORTEST_CUTOFF)}, costs="longer samples are cut off")


def sharding(run: RunDescription, shards: Sequence[DeepSpeedFile]) -> Iterator[Change]:
    """ZeRO for a run on several GPUs that has none, where LLaMA-Factory takes it (its parser and model/adapter.py)."""
    if run.deepspeed is not None or run.fsdp_plan is not None or run.pure_bf16 or not _plain_adamw(run):
        return
    foreign = run.quantization_bit is not None and (run.quantization_method, run.quantization_bit) != ("bnb", 4)
    third = not (run.predict_with_generate or run.pissa_init or foreign or len(run.adapter_name_or_path) > 1)
    costs = {
        2: "some speed: optimizer states and gradients are shared",
        3: "speed: weights are gathered as they are used",
    }
    for file in shards:
        zero = file.get("zero_optimization", {})
        if zero.get("stage") == 2 or third:
            cost = costs[zero.get("stage")]
            offloads = "offload_optimizer" in zero
            yield Change(
                set={"deepspeed": file}, costs=phrase("{cost}, and main memory", cost=cost) if offloads else cost
            )


def _smaller_divisors(number: int) -> list[int]:
    """The divisors below a number, the largest first."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({number // divisor for divisor in small[1:]} | set(small) - {number}, reverse=True)


def _evaluates(run: RunDescription) -> bool:
    return (bool(run.eval_dataset) or run.val_size > 0) and (run.do_eval or run.eval_strategy != "no")


def _plain_adamw(run: RunDescription) -> bool:
    """LLaMA-Factory's own optimizers bring classes of their own and ignore `optim`, or refuse another."""
    own = (run.use_galore, run.use_apollo, run.use_badam, run.use_adam_mini, run.use_muon)
    return not any(own) and (run.optim or "adamw_torch").startswith("adamw_torch")


def _may_quantize(run: RunDescription) -> bool:
    """LLaMA-Factory refuses to quantize under PiSSA, a resized vocabulary, or below several adapters or a new one."""
    several = len(run.adapter_name_or_path) > 1 or (bool(run.adapter_name_or_path) and run.create_new_adapter)
    return not (run.pissa_init or run.resize_vocab or several)
