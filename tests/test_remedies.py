"""Every remedy must be worth printing: it fits, LLaMA-Factory takes it, and it keeps what it promises to keep."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import memory, preflight, verdict
from llamafactory_preflight.advice import changes, remedies
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


GIB = 2**30
SOFTWARE = Software(
    llamafactory="0.9.5", torch="2.9.1", transformers="5.6.0", liger_kernel="0.8.5", bitsandbytes="0.50.2"
)
SIZES = {  # hidden, layers, heads, intermediate, tied
    "0.6b": (1024, 28, 16, 3072, True),
    "1.7b": (2048, 28, 16, 6144, True),
    "8b": (4096, 36, 32, 12288, False),
    "14b": (5120, 40, 40, 17408, False),
    "32b": (5120, 64, 64, 25600, False),
}
SETTINGS: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 8},
    {"per_device_train_batch_size": 6, "cutoff_len": 4096, "optim": "adamw_torch"},
    {"quantization_bit": 4, "cutoff_len": 16384, "disable_gradient_checkpointing": True},
    {"finetuning_type": "full"},
    {"finetuning_type": "full", "pure_bf16": True, "bf16": False, "enable_liger_kernel": True, "cutoff_len": 8192},
    {"stage": "dpo", "per_device_train_batch_size": 4},
    {"val_size": 0.1, "eval_strategy": "steps", "cutoff_len": 8192, "enable_liger_kernel": True},
    {"pissa_init": True, "per_device_train_batch_size": 4, "cutoff_len": 4096},
]
FRACTIONS = (0.35, 0.6, 0.85)


def model(name: str) -> dict[str, Any]:
    hidden, layers, heads, width, tied = SIZES[name]
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": width, "vocab_size": 151936,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
    }  # fmt: skip


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(model(name))


def arguments(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    base = {
        "model_name_or_path": "m", "stage": "sft", "do_train": True, "finetuning_type": "lora", "template": "qwen3",
        "dataset": "identity", "bf16": True, "gradient_accumulation_steps": 2, "output_dir": str(folder),
        "use_cpu": True,
    }  # fmt: skip
    return base | settings


def fitting(budget: int) -> Callable[[MemoryEstimate], bool]:
    return lambda estimate: verdict.judge_gpu(estimate, context_bytes=0, budget_bytes=budget).word == "fits"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    given: dict[str, Any]
    run: RunDescription
    budget: int
    found: tuple[Remedy, ...]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Runs that do not fit, each with what is proposed for it."""
    folder = tmp_path_factory.mktemp("out")
    out = []
    for size, settings, fraction in itertools.product(SIZES, SETTINGS, FRACTIONS):
        given = arguments(settings, folder)
        run = from_arguments(given, software=SOFTWARE, origin="test")
        predict = partial(memory.estimate, shape=shape(size), software=SOFTWARE)
        budget = int(max(predict(run).phases.values()) * fraction)
        found = remedies.remedies(run, "qwen3", software=SOFTWARE, predict=predict, fits=fitting(budget))
        out.append(Case(name=f"{size} {settings} {fraction}", given=given, run=run, budget=budget, found=found))
    return out


def test_at_least_forty_runs_get_a_remedy_and_each_remedy_fits(cases: list[Case]) -> None:
    assert sum(bool(case.found) for case in cases) >= 40
    for case in cases:
        assert all(fitting(case.budget)(remedy.estimate) for remedy in case.found), case.name


def test_llamafactory_itself_accepts_every_remedy(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.hparams import parser

    monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT", "off")
    monkeypatch.setattr(
        parser, "is_torch_bf16_gpu_available", lambda: True
    )  # pure_bf16 needs a card; this is a laptop
    accepted = 0
    for case in cases:
        for remedy in case.found:
            parser.get_train_args(case.given | dict(remedy.set))
            accepted += 1
    assert accepted >= 40


def test_the_effective_batch_stays_as_it_was(cases: list[Case]) -> None:
    def effective(run: RunDescription) -> int:
        return run.per_device_train_batch_size * run.gradient_accumulation_steps

    changed = [
        (effective(case.run), effective(dataclasses.replace(case.run, **remedy.set)))
        for case in cases
        for remedy in case.found
        if "per_device_train_batch_size" in remedy.set
    ]
    assert changed
    assert all(before == after for before, after in changed)


def test_changes_come_in_the_order_of_what_they_cost() -> None:
    full = RunDescription(
        model_name_or_path="m", do_train=True, bf16=True, finetuning_type="full", optim="adamw_torch", cutoff_len=512,
        disable_gradient_checkpointing=True, per_device_train_batch_size=2, val_size=0.1, eval_strategy="steps",
    )  # fmt: skip
    shards = changes.deepspeed_files(paths.pack_folder())

    def names(run: RunDescription) -> list[str]:
        found = changes.changes(run, "qwen3", software=SOFTWARE, shards=shards)
        return [name for name, _ in itertools.groupby(next(iter(change.set)) for change in found)]

    assert names(full) == [
        "enable_liger_kernel", "optim", "per_device_eval_batch_size", "disable_gradient_checkpointing",
        "per_device_train_batch_size", "deepspeed", "optim", "bf16", "finetuning_type",
        "cutoff_len",
    ]  # fmt: skip
    adapters = dataclasses.replace(full, finetuning_type="lora", disable_gradient_checkpointing=False)
    assert names(adapters)[3:] == [
        "per_device_train_batch_size", "use_unsloth_gc", "deepspeed", "quantization_bit", "cutoff_len"
    ]  # fmt: skip


def test_what_costs_nothing_comes_first_and_alone_if_it_suffices() -> None:
    run = RunDescription(
        model_name_or_path="m",
        do_train=True,
        bf16=True,
        quantization_bit=4,
        cutoff_len=16384,
        per_device_train_batch_size=1,
    )
    predict = partial(memory.estimate, shape=shape("32b"), software=SOFTWARE)
    found = remedies.remedies(run, "qwen3", software=SOFTWARE, predict=predict, fits=fitting(38 * GIB))
    assert [remedy.line for remedy in found] == ["enable_liger_kernel=true"]


@pytest.mark.parametrize(
    ("missing", "key"), [("liger_kernel", "enable_liger_kernel"), ("bitsandbytes", "quantization_bit")]
)
def test_nothing_is_proposed_that_needs_a_missing_package(missing: str, key: str) -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, per_device_train_batch_size=8)
    bare = dataclasses.replace(SOFTWARE, **{missing: None})
    assert key in {name for change in changes.changes(run, "qwen3", software=SOFTWARE) for name in change.set}
    assert key not in {name for change in changes.changes(run, "qwen3", software=bare) for name in change.set}


def test_bf16_is_never_proposed_to_a_card_that_lacks_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model("1.7b")))
    given = {
        "model_name_or_path": str(tmp_path), "do_train": True, "bf16": True, "finetuning_type": "full",
        "enable_liger_kernel": True, "per_device_train_batch_size": 1,
    }  # fmt: skip
    looked = {gpu: preflight.check(given, gpu=gpu, host_ram="256GiB") for gpu in ("v100", "rtx4080")}
    proposed = {gpu: any("pure_bf16" in remedy.set for remedy in result.remedies) for gpu, result in looked.items()}
    assert proposed == {"v100": False, "rtx4080": True}
    assert all(result.remedies for result in looked.values())


def test_pissa_is_never_quantized() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, pissa_init=True)
    sets = [change.set for change in changes.changes(run, "qwen3", software=SOFTWARE)]
    assert all("quantization_bit" not in changed for changed in sets)


def test_a_combination_has_no_change_that_it_fits_without(cases: list[Case]) -> None:
    tried = 0
    for case in cases:
        paid = [change.set for change in changes.changes(case.run, "qwen3", software=SOFTWARE) if not change.free]
        for remedy in case.found:
            parts = [part for part in paid if part.items() <= remedy.set.items()]
            for part in parts if len(parts) > 1 else ():
                rest = {key: value for key, value in remedy.set.items() if key not in part}
                changed = dataclasses.replace(case.run, **rest)
                estimate = memory.estimate(changed, shape(case.name.split()[0]), software=SOFTWARE)
                assert not fitting(case.budget)(estimate), (case.name, remedy.line, part)
                tried += 1
    assert tried


def searched(run: RunDescription, budget: int) -> tuple[tuple[Remedy, ...], int]:
    """What is proposed for a run of the 8B model, and how many predictions that took."""
    predicted = 0

    def predict(changed: RunDescription) -> MemoryEstimate:
        nonlocal predicted
        predicted += 1
        return memory.estimate(changed, shape("8b"), software=SOFTWARE)

    found = remedies.remedies(run, "qwen3", software=SOFTWARE, predict=predict, fits=fitting(budget))
    return found, predicted


@pytest.mark.parametrize("cutoff", [131_072, 2**31 - 1])
def test_a_long_cutoff_is_shortened_in_a_few_predictions(cutoff: int) -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, cutoff_len=cutoff)
    found, predicted = searched(run, 23 * GIB)
    (remedy,) = found
    assert 1024 <= remedy.set["cutoff_len"] <= 32_768
    assert predicted < 60


def test_a_batch_is_cut_to_any_divisor() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, per_device_train_batch_size=9)
    sets = [change.set for change in changes.changes(run, "qwen3", software=SOFTWARE)]
    cut = [(s["per_device_train_batch_size"], s["gradient_accumulation_steps"]) for s in sets if len(s) == 2]
    assert cut[:2] == [(3, 3), (1, 9)]


def test_a_combination_names_only_what_is_paid() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, finetuning_type="full", cutoff_len=16384)
    (remedy,), _ = searched(run, 22 * GIB)
    assert remedy.set["enable_liger_kernel"] and len(remedy.set) > 2
    assert "nothing" not in remedy.costs
