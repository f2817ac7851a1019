"""What `--tune` changes: faster by the model of cost, fitting, and training the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_preflight import memory
from llamafactory_preflight.commands import new_preset
from llamafactory_preflight.data import sample_lengths
from llamafactory_preflight.device import Device
from llamafactory_preflight.fitting import judgement, speed, tune
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import RunDescription
from test_fit import GIB, MAY_NOT_CHANGE, folder, preflight_of  # noqa: F401
from test_remedies import SOFTWARE, shape


LENGTHS = [64, 100, 150, 200, 400]
# LLaMA-Factory's own examples: one sample at a time, accumulated.
EXAMPLES: list[tuple[str, dict[str, Any], str, int]] = [
    ("8b", {"gradient_accumulation_steps": 8}, "RTX 4090", 24),
    ("8b", {"gradient_accumulation_steps": 8}, "A100", 80),
    ("8b", {"gradient_accumulation_steps": 8, "quantization_bit": 4}, "RTX 4090", 24),
    ("14b", {"gradient_accumulation_steps": 8, "quantization_bit": 4}, "RTX 4090", 24),
    ("1.7b", {"gradient_accumulation_steps": 2, "finetuning_type": "full"}, "A100", 80),
    ("1.7b", {"gradient_accumulation_steps": 8, "lora_rank": 64}, "RTX 3090", 24),
    ("0.6b", {"gradient_accumulation_steps": 16, "finetuning_type": "full"}, "RTX 4090", 24),
    ("0.6b", {"gradient_accumulation_steps": 64, "cutoff_len": 1024}, "H100", 80),
    ("8b", {"gradient_accumulation_steps": 8, "stage": "dpo"}, "H100", 80),
    ("32b", {"gradient_accumulation_steps": 8}, "H200", 140),
]


def looked_at(size: str, settings: dict[str, Any], card: str, gib: int) -> Result:
    run = RunDescription(
        **{"model_name_or_path": "m", "do_train": True, "bf16": True, "per_device_train_batch_size": 1,
           "dataset": ("identity",), "optim": "adamw_torch_fused", "packing": False} | settings
    )  # fmt: skip
    device = Device(name=card, total_bytes=gib * GIB, free_bytes=gib * GIB)
    estimate = memory.estimate(run, shape(size), software=SOFTWARE)
    return Result(
        origin="test", run=run, software=SOFTWARE, shape=shape(size), estimate=estimate, device=device,
        devices=(device,), host_budget_bytes=None, verdict=judgement.judge(estimate, device, None), findings=(),
        resolved=(),
    )  # fmt: skip


def samples(run: RunDescription, lengths: list[int]) -> float:
    """Samples of one optimizer step."""
    mean = sum(lengths) / len(lengths)
    per_sequence = 0.95 * run.cutoff_len / mean if run.packing else 1
    return run.per_device_train_batch_size * run.gradient_accumulation_steps * per_sequence


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example[0]}-{example[2]}")
def test_what_is_tuned_fits_trains_the_same_and_is_faster(example: Any) -> None:
    result = looked_at(*example)
    found = tune.tuned(result, LENGTHS)
    assert found is not None and result.shape is not None and result.device is not None
    assert not MAY_NOT_CHANGE & found.set.keys()
    after = dataclasses.replace(result.run, **found.set)
    again = memory.estimate(after, result.shape, software=SOFTWARE)
    assert judgement.judge(again, result.device, None).word == "fits"
    assert 0.85 <= samples(after, LENGTHS) / samples(result.run, LENGTHS) <= 1.15
    if result.verdict.word == "fits":
        assert found.gain >= 1


def test_a_run_that_is_as_fast_as_it_gets_is_left_alone() -> None:
    result = looked_at("8b", {"gradient_accumulation_steps": 8}, "A100", 80)
    first = tune.tuned(result, LENGTHS)
    assert first is not None and first.set
    run = dataclasses.replace(result.run, **first.set)
    estimate = memory.estimate(run, shape("8b"), software=SOFTWARE)
    again = tune.tuned(dataclasses.replace(result, run=run, estimate=estimate), LENGTHS)
    assert again is not None and again.set == {}


def test_short_samples_are_packed_where_the_batch_is_large_enough() -> None:
    result = looked_at("0.6b", {"gradient_accumulation_steps": 64, "cutoff_len": 1024}, "H100", 80)
    wanted = [dict(changed) for changed in tune.candidates(result, LENGTHS)]
    assert any(changed.get("neat_packing") for changed in wanted)
    for lengths in ([], [1024], [600, 700]):
        assert not any(changed.get("neat_packing") for changed in tune.candidates(result, lengths))


def per_token(**settings: Any) -> float:
    run = RunDescription(
        **{"model_name_or_path": "m", "bf16": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
           "cutoff_len": 2048, "optim": "adamw_torch_fused"} | settings
    )  # fmt: skip
    return speed.seconds(run, shape("8b"), [2048], Device(name="A100", total_bytes=None, free_bytes=None))


def test_the_cost_follows_the_physics() -> None:
    base = per_token()
    assert per_token(disable_gradient_checkpointing=True) < base
    assert per_token(enable_liger_kernel=True) < base
    assert per_token(quantization_bit=4) > base
    assert per_token(finetuning_type="full") > per_token(finetuning_type="full", disable_gradient_checkpointing=True)
    assert per_token(optim="adamw_torch") >= base


def test_padding_costs_and_small_batches_are_bound_by_launching() -> None:
    run = RunDescription(model_name_or_path="m", bf16=True, per_device_train_batch_size=1)
    short, mixed = [64] * 4, [16, 16, 16, 2000]
    one = speed.work(run, short)
    assert (one.tokens, one.real_tokens) == (64, 64)
    padded = speed.work(dataclasses.replace(run, per_device_train_batch_size=8), mixed)
    assert padded.tokens > 8 * sum(mixed) / 4
    eight = dataclasses.replace(run, per_device_train_batch_size=8)
    card = Device(name="H100", total_bytes=None, free_bytes=None)
    assert speed.seconds(eight, shape("0.6b"), short, card) < 0.2 * speed.seconds(run, shape("0.6b"), short, card)


def test_lengths_are_read_off_the_files_of_a_data_set(tmp_path: Path) -> None:
    rows = [{"instruction": "a" * 40, "input": "", "output": "b" * 400}, {"conversations": [{"value": "c" * 80}]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"rows": {"file_name": "rows.json"}, "far": {"hf_hub_url": "x"}})
    )
    run = RunDescription(model_name_or_path="m", dataset=("rows",), dataset_dir=str(tmp_path))
    assert sample_lengths.estimated(run) == [120, 25]
    assert sample_lengths.estimated(dataclasses.replace(run, dataset=("far",))) == []
    assert sample_lengths.estimated(dataclasses.replace(run, dataset_dir="nowhere")) == []


def test_a_preset_for_any_card_is_complete_and_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    words = ["--model", "model", "--gpu", "48GiB", "--method", "lora", "--tune", "-o", "my.yaml"]
    assert preflight_of(*words) == 0
    text = (folder / "my.yaml").read_text()
    assert preflight_of("my.yaml", "--gpu", "48GiB") == 0
    assert "FITS" in capsys.readouterr().out
    written = yaml.safe_load(text)
    assert written["template"] == "qwen3" and written["learning_rate"] == 1e-4
    assert written["per_device_train_batch_size"] * written["gradient_accumulation_steps"] == 16
    assert "predicted to need" in text.splitlines()[0]
    assert all(f"{name}:" in text and f"# {new_preset.COMMENTS[name]}" in text for name in ("cutoff_len", "bf16"))


@pytest.mark.parametrize("method", new_preset.METHODS)
def test_a_preset_of_every_method_fits_or_says_that_none_does(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    method: str,
) -> None:
    assert preflight_of("--model", "model", "--gpu", "200GiB", "--method", method) == 0
    assert yaml.safe_load(capsys.readouterr().out)["finetuning_type"] == method.removeprefix("q")
    assert preflight_of("--model", "model", "--gpu", "4GiB", "--method", method) == 1
    assert "does not fit there" in capsys.readouterr().err


def test_tune_prints_what_it_gains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    words = ["a.yaml", "per_device_train_batch_size=1", "gradient_accumulation_steps=8", "--gpu", "80GiB", "--tune"]
    assert preflight_of(*words, "-o", "b.yaml") == 0
    assert "x as fast" in capsys.readouterr().err
    assert preflight_of("b.yaml", "--gpu", "80GiB", "--tune") == 0
    assert "as fast as it gets" in capsys.readouterr().err
    assert preflight_of("a.yaml", "--gpu", "4GiB", "--tune") == 1


PARSER = """
import sys, yaml
from llamafactory.hparams import get_train_args
for file in sys.argv[1:]:
    given = yaml.safe_load(open(file)) | {"use_cpu": True}
    model, data, training, finetuning, _ = get_train_args(given)
    print("PARSED", file, data.template, finetuning.finetuning_type, training.learning_rate, model.quantization_bit)
"""


def test_llamafactory_s_own_parser_takes_a_preset_of_every_method(run: Any, folder: Path) -> None:  # noqa: F811
    for method in new_preset.METHODS:
        words = ["--model", "model", "--gpu", "200GiB", "--method", method, "-o", f"{method}.yaml"]
        assert preflight_of(*words, "cutoff_len=1024", "dataset=mine") == 0
        written = yaml.safe_load((folder / f"{method}.yaml").read_text())
        assert (written["cutoff_len"], written["dataset"]) == (1024, "mine")
    (folder / "parse.py").write_text(PARSER)
    done = run(["python", "parse.py", *(f"{method}.yaml" for method in new_preset.METHODS)], cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PARSED")]
    assert [row[0] for row in parsed] == [f"{method}.yaml" for method in new_preset.METHODS]
    assert [row[2] for row in parsed] == ["lora", "lora", "full", "freeze"]
    assert {row[1] for row in parsed} == {"qwen3"} and [row[4] for row in parsed] == ["None", "4", "None", "None"]


@pytest.mark.parametrize(
    ("name", "template"),
    [("Qwen3-4B-Instruct-2507", "qwen3_nothink"), ("Qwen3-4B-Thinking-2507", "qwen3"), ("Qwen3-8B", "qwen3")],
)
def test_the_template_is_the_models_own(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    name: str,
    template: str,
) -> None:
    (folder / "model").rename(folder / name)
    assert preflight_of("--model", name, "--gpu", "200GiB") == 0
    written = yaml.safe_load(capsys.readouterr().out)
    assert written["template"] == template
    assert written.get("enable_thinking") is (False if name == "Qwen3-8B" else None)
