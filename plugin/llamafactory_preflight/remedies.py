"""What to change when a run does not fit: what costs nothing first, then one change more, then a combination.

Each change is tried on the prediction itself; none is offered that LLaMA-Factory would refuse with the rest of the
settings or that needs a package which is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


Predict = Callable[[RunDescription], MemoryEstimate]
Fits = Callable[[MemoryEstimate], bool]
Changes = Callable[[RunDescription], Iterable["Change"]]

LIGER_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"})
"""Those of our families that llamafactory/model/model_utils/liger_kernel.py knows."""
CUTOFF_STEP = 256
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
class Remedy:
    """One change.

    Attributes:
        set: Arguments by LLaMA-Factory's names.
        costs: What it costs the user, in words.
        estimate: The prediction with it.
    """

    set: Mapping[str, Any]
    costs: str
    estimate: MemoryEstimate

    @property
    def line(self) -> str:
        """The change as it is appended to a command line."""
        return " ".join(items(self.set))


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A candidate: what it sets and what it costs; `free` changes cost nothing and go with every remedy."""

    set: Mapping[str, Any]
    costs: str
    free: bool = False


def remedies(
    run: RunDescription,
    model_type: str,
    *,
    software: Software,
    predict: Predict,
    fits: Fits,
    shards: Sequence[DeepSpeedFile] = (),
    kept: frozenset[str] = frozenset(),
) -> tuple[Remedy, ...]:
    """Finds what makes a run fit.

    Args:
        run: The run that does not fit.
        model_type: The model's type, for what depends on its code.
        software: Installed versions.
        predict: Predicts a changed run.
        fits: Whether a prediction is within the budget for certain.
        shards: DeepSpeed files that several ranks could use, the least costly first.
        kept: Arguments that stay as they are, except for changes that cost nothing.

    Returns:
        What costs nothing, if that suffices; else every single change that suffices with it, the least costly first;
        else the shortest prefix of all changes that does, without those that turn out not to be needed.
    """

    def candidates(changed: RunDescription) -> Iterator[Change]:
        found = [*changes(changed, model_type, software=software), *sharding(changed, shards)]
        return (change for change in found if change.free or not kept & change.set.keys())

    free = [change for change in candidates(run) if change.free]
    base = _merged(change.set for change in free)
    if free:
        remedy = _tried(run, base, "; ".join(change.costs for change in free), predict)
        if remedy is not None and fits(remedy.estimate):
            return (remedy,)
    single: dict[str, Remedy] = {}
    for change in candidates(replace(run, **base)):
        key = next(iter(change.set))
        if change.free or key in single:
            continue
        remedy = _tried(run, _merged((base, change.set)), change.costs, predict)
        if remedy is not None and fits(remedy.estimate):
            single[key] = remedy
    if single:
        return tuple(single.values())
    combined = _combination(run, candidates, predict=predict, fits=fits)
    return () if combined is None else (combined,)


def changes(run: RunDescription, model_type: str, *, software: Software) -> Iterator[Change]:
    """Every change that applies to a run, ordered by its cost: nothing, speed, precision, what is learnt from."""
    adapters = run.finetuning_type in ("lora", "oft")
    if not run.enable_liger_kernel and model_type in LIGER_MODEL_TYPES and software.liger_kernel is not None:
        yield Change(set={"enable_liger_kernel": True}, costs="nothing, it is faster", free=True)
    if run.optim == "adamw_torch" and _plain_adamw(run) and software.at_least("torch", 2, 8):
        yield Change(set={"optim": "adamw_torch_fused"}, costs="nothing, it is faster", free=True)
    if _evaluates(run) and run.per_device_eval_batch_size > 1:
        yield Change(set={"per_device_eval_batch_size": 1}, costs="a slower evaluation")
    if run.disable_gradient_checkpointing and not run.gradient_checkpointing:
        yield Change(set={"disable_gradient_checkpointing": False}, costs="about a third more time a step")
    batch = run.per_device_train_batch_size
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        accumulation = run.gradient_accumulation_steps * run.per_device_train_batch_size // batch
        yield Change(
            set={"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation},
            costs="some speed; the effective batch stays",
        )
    if not run.use_unsloth_gc and not run.disable_gradient_checkpointing:
        yield Change(set={"use_unsloth_gc": True}, costs="some speed and main memory")
    if run.finetuning_type in ("full", "freeze") and _plain_adamw(run) and software.bitsandbytes and not run.deepspeed:
        yield Change(set={"optim": "paged_adamw_8bit"}, costs="some speed; 8-bit optimizer states in main memory")
    if run.finetuning_type in ("full", "freeze") and run.bf16 and run.deepspeed is None:
        yield Change(set={"bf16": False, "pure_bf16": True}, costs="precision: no float32 master weights")
    if adapters and run.quantization_bit is None and _may_quantize(run) and software.bitsandbytes is not None:
        yield Change(set={"quantization_bit": 4}, costs="some precision and speed: base weights in 4 bit")
    if run.finetuning_type == "full" and run.stage in ("pt", "sft", "dpo", "kto", "rm"):
        yield Change(set={"finetuning_type": "lora"}, costs="another method: adapters instead of all weights")
    shorter = (run.cutoff_len - 1) // CUTOFF_STEP * CUTOFF_STEP
    for cutoff in range(shorter, SHORTEST_CUTOFF - 1, -CUTOFF_STEP):
        yield Change(set={"cutoff_len": cutoff}, costs="longer samples are cut off")


def sharding(run: RunDescription, shards: Sequence[DeepSpeedFile]) -> Iterator[Change]:
    """ZeRO for a run on several GPUs that has none, where LLaMA-Factory takes it (its parser and model/adapter.py)."""
    if run.deepspeed is not None or run.pure_bf16 or not _plain_adamw(run):
        return
    third = not (
        run.predict_with_generate or run.pissa_init or run.quantization_bit or len(run.adapter_name_or_path) > 1
    )
    costs = {
        2: "some speed: optimizer states and gradients are shared",
        3: "speed: weights are gathered as they are used",
    }
    for file in shards:
        zero = file.get("zero_optimization", {})
        if zero.get("stage") == 2 or third:
            offloads = ", and main memory" if "offload_optimizer" in zero else ""
            yield Change(set={"deepspeed": file}, costs=costs[zero.get("stage")] + offloads)


def _combination(run: RunDescription, candidates: Changes, *, predict: Predict, fits: Fits) -> Remedy | None:
    """Adds changes in order until the run fits, then takes back each one that it fits without."""
    taken: dict[str, Mapping[str, Any]] = {}
    costs: dict[str, str] = {}
    remedy = None
    while remedy is None or not fits(remedy.estimate):
        current = replace(run, **_merged(taken.values()))
        for change in candidates(current):
            name = next(iter(change.set))
            tried = _tried(run, _merged([*taken.values(), change.set]), change.costs, predict)
            if tried is None or (remedy is not None and not _smaller(tried, remedy)):
                continue
            taken[name], costs[name], remedy = change.set, change.costs, tried
            break
        else:
            return None
    for name in tuple(taken):
        rest = [value for key, value in taken.items() if key != name]
        without = _tried(run, _merged(rest), "", predict)
        if without is not None and fits(without.estimate):
            taken.pop(name)
            remedy = without
    return replace(remedy, costs="; ".join(costs[name] for name in taken))


def _tried(run: RunDescription, changed: Mapping[str, Any], costs: str, predict: Predict) -> Remedy | None:
    try:
        printed = {key: value.path if isinstance(value, DeepSpeedFile) else value for key, value in changed.items()}
        return Remedy(set=printed, costs=costs, estimate=predict(replace(run, **changed)))
    except Unmodelled:
        return None


def _merged(sets: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for changed in sets:
        merged |= changed
    return merged


def _smaller(one: Remedy, other: Remedy) -> bool:
    return max(one.estimate.phases.values()) < max(other.estimate.phases.values())


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


def items(changed: Mapping[str, Any]) -> list[str]:
    """Arguments as they are written on a command line."""
    return [f"{key}={as_text(value)}" for key, value in changed.items()]


def as_text(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
