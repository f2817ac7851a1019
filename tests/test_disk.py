"""What a training writes, against free space; the sizes of checkpoints against files that were really written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import report
from llamafactory_preflight.findings.disk import disk_after_data, disk_space, output_folder
from llamafactory_preflight.machine import checkpoint_size, disk, host
from llamafactory_preflight.machine.checkpoint_size import Checkpoint
from llamafactory_preflight.machine.disk import Need
from llamafactory_preflight.model.hub import ModelSource
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB, MIB
from llamafactory_preflight.verdict import Verdict


QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
PARAMETERS = 8_190_735_360
SHAPE = ModelShape.from_config(QWEN3_8B)
SOFTWARE = Software(torch="2.9.1", transformers="5.6.0")
TRAINING: Mapping[str, Any] = {"do_train": True, "output_dir": "out"}


def checkpoint(**asked: Any) -> Checkpoint:
    found = checkpoint_size.of_shape(RunDescription(**{"optim": "adamw_torch"} | asked), SHAPE, software=SOFTWARE)
    assert found is not None
    return found


def test_full_tuning_saves_float32_and_two_moments() -> None:
    size = checkpoint(finetuning_type="full", bf16=True)
    assert size.model == 4 * PARAMETERS
    assert size.states == pytest.approx(8 * PARAMETERS, rel=0.001)
    assert checkpoint(finetuning_type="full", pure_bf16=True).model == 2 * PARAMETERS
    assert checkpoint(finetuning_type="full", save_only_model=True).states == 0


def test_adapters_are_saved_without_the_model() -> None:
    size = checkpoint(finetuning_type="lora", lora_rank=16)
    assert size.model == 4 * 43_646_976
    assert size.states == pytest.approx(2 * size.model, rel=0.01)


def test_states_that_are_paged_to_main_memory_are_saved_too() -> None:
    size = checkpoint(finetuning_type="full", pure_bf16=True, optim="paged_adamw_8bit")
    assert size.states == 2 * PARAMETERS


@pytest.mark.parametrize(("stage", "bytes_a_parameter"), [(0, 14), (1, 14), (2, 14), (3, 12)])
def test_deepspeed_saves_a_float32_copy_and_two_moments(stage: int, bytes_a_parameter: int) -> None:
    plan = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    full = checkpoint(finetuning_type="full", deepspeed=plan)
    assert (full.model, full.states) == (2 * PARAMETERS, bytes_a_parameter * PARAMETERS)
    adapters = checkpoint(finetuning_type="lora", lora_rank=16, deepspeed=plan)
    assert (adapters.model, adapters.states) == (2 * 43_646_976, bytes_a_parameter * 43_646_976)
    assert checkpoint(finetuning_type="full", deepspeed=plan, save_only_model=True).states == 0


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "epoch", "num_train_epochs": 2.5}, 3),
        ({"save_strategy": "epoch", "num_train_epochs": 3, "max_steps": 10}, None),
        ({"max_steps": 1000, "save_steps": 300}, 4),
        ({"save_steps": 0.1}, 10),
        ({"save_steps": 500}, None),
        ({"save_steps": 0}, None),
        ({"save_strategy": "best"}, None),
    ],
)
def test_how_many_checkpoints_there_will_be(asked: dict[str, Any], number: int | None) -> None:
    assert checkpoint_size.num_saved(RunDescription(**asked)) == number


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"save_strategy": "no"}, 0),
        ({"max_steps": 1000, "save_steps": 100}, 10),
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 2}, 3),  # the third replaces the first
        ({"max_steps": 1000, "save_steps": 1000, "save_total_limit": 2}, 1),
        ({"save_total_limit": 2}, 3),
        ({}, 1),
    ],
)
def test_what_is_kept_of_them(asked: dict[str, Any], kept: int) -> None:
    (need,) = disk.checkpoints(RunDescription(**TRAINING, **asked), Checkpoint(model=10, states=20))
    assert (need.kind, need.folder, need.size) == ("checkpoints", Path("out"), 10 + kept * 30)


def test_checkpoints_that_may_not_all_be_written_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    each, limited = Checkpoint(model=4 * GIB, states=8 * GIB), RunDescription(**TRAINING, save_total_limit=3)
    (need,) = disk.checkpoints(limited, each)
    assert (need.size, need.certain) == (52 * GIB, 16 * GIB)
    for free, severity in ((15, "error"), (17, "warning")):
        monkeypatch.setattr(host, "free_disk_bytes", lambda path, free=free: free * GIB)
        assert [finding.severity for finding in disk_space(limited, [need], each)] == [severity]


def test_a_run_that_does_not_train_saves_nothing() -> None:
    assert list(disk.checkpoints(RunDescription(output_dir="out"), Checkpoint(model=1, states=1))) == []


def test_the_cache_of_local_data(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("x" * 1000)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/1.json").write_text("x" * 100)
    described = {
        "a": {"file_name": "a.json"},
        "b": {"file_name": "parts"},
        "c": {"hf_hub_url": "x/y"},
        "d": 1,
        "e": {},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(described))
    run = RunDescription(dataset=("a", "b", "c", "d", "unknown"), dataset_dir=str(tmp_path))
    (need,) = disk.data(run, {"HF_DATASETS_CACHE": "/somewhere"})
    assert (need.kind, need.folder, need.size) == ("data", Path("/somewhere"), 1100 * disk.CACHE_PER_BYTE)
    for other in ({"streaming": True}, {"tokenized_path": "x"}, {"dataset_dir": str(tmp_path / "none")}):
        assert list(disk.data(RunDescription(**{"dataset": ("a",), "dataset_dir": str(tmp_path)} | other), {})) == []


def needs(tmp_path: Path, **sizes: int) -> list[Need]:
    return [
        Need(kind=kind, folder=tmp_path / kind, size=size, certain=0 if kind == "data" else size)  # type: ignore[arg-type]
        for kind, size in sizes.items()
    ]


def test_what_fits_alone_may_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: 100 * GIB)
    both = needs(tmp_path, weights=60 * GIB, checkpoints=70 * GIB)
    (found,) = disk_space(RunDescription(save_total_limit=1), both)
    assert (found.id, found.severity) == ("disk-checkpoints", "error")
    assert report.message(found) == (
        "The run writes about 70.00 GiB for checkpoints and 60.00 GiB for the weights to download, and 100.00 GiB are "
        f"free at {tmp_path / 'checkpoints'}. Fewer of them: save_total_limit=1, save_only_model=true."
    )
    monkeypatch.setattr(host, "file_system", str)  # each on its own
    assert list(disk_space(RunDescription(save_total_limit=1), both)) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(folder: str) -> list[Finding]:
        return list(output_folder(RunDescription(do_train=True, output_dir=folder)))

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("there").mkdir()
    Path("link").symlink_to("nowhere")
    assert [found(folder) for folder in ("there", "there/new", "new/deeper", "link", str(tmp_path))] == [[]] * 5
    for folder in ("file", "file/below"):
        (finding,) = found(folder)
        assert (finding.id, finding.severity) == ("output-dir", "error")
        assert report.message(finding) == f"`output_dir: {folder}` cannot be made: {tmp_path / 'file'} is a file."
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (finding,) = found("there/new")
    assert f"cannot be written: you have no permission for {tmp_path / 'there'}." in report.message(finding)


def test_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: 4 * GIB)
    source = ModelSource(config={}, place="a hub", download_bytes=5 * GIB, cache_dir=tmp_path)
    (found,) = disk_space(RunDescription(), list(disk.weights(source)))
    assert (found.id, found.severity, found.set) == ("disk-weights", "error", None)
    assert list(disk.weights(ModelSource(config={}, place="", download_bytes=None, cache_dir=tmp_path))) == []


def test_a_rough_amount_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: 4 * GIB)
    (found,) = disk_space(RunDescription(), needs(tmp_path, data=5 * GIB))
    assert (found.id, found.severity) == ("disk-data", "warning")


def test_checkpoints_without_a_limit_on_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: 50 * GIB)
    written, each = needs(tmp_path, checkpoints=25 * GIB), Checkpoint(model=4 * GIB, states=8 * GIB)
    (found,) = disk_space(RunDescription(), written, each)
    assert (found.id, found.severity, found.set) == ("checkpoints-unlimited", "info", {"save_total_limit": 2})
    assert "Every checkpoint of 12.00 GiB is kept" in report.message(found) and found.message.endswith("room for 4.")
    for run in (RunDescription(save_total_limit=2), RunDescription(max_steps=10)):
        assert list(disk_space(run, written, each)) == []
    assert list(disk_space(RunDescription(), written, Checkpoint(model=MIB, states=0))) == []


def test_a_disk_that_cannot_be_read_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: None)
    assert list(disk_space(RunDescription(), needs(tmp_path, weights=10**15), Checkpoint(model=1, states=1))) == []


def test_the_data_says_how_many_checkpoints_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_disk_bytes", lambda path: 1500 * GIB)
    run = RunDescription(**TRAINING, finetuning_type="full", optim="adamw_torch", per_device_train_batch_size=1)
    result = Result(
        origin="x", run=run, software=SOFTWARE, shape=SHAPE, estimate=None, device=None, devices=(),
        host_budget_bytes=None, verdict=Verdict(word="fits", reasons=()), findings=(), resolved=(),
    )  # fmt: skip
    assert list(disk_after_data(result, num_samples=1000)) == []  # 6 of 92 GiB
    (found,) = disk_after_data(result, num_samples=10_000)  # 60 of them
    assert (found.id, found.severity) == ("disk-checkpoints", "error")
    for other in (
        dataclasses.replace(result, shape=None),
        dataclasses.replace(result, serves=True),
        dataclasses.replace(result, run=dataclasses.replace(run, max_steps=10)),
        dataclasses.replace(result, run=dataclasses.replace(run, lora_target=("odd.*",), finetuning_type="lora")),
    ):
        assert list(disk_after_data(other, num_samples=10_000)) == []
