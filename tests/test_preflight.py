from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import device, guard, memory, preflight, report
from llamafactory_preflight.data.lengths import Longest
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.machine import host
from llamafactory_preflight.memory import Card, MemoryEstimate
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB, MIB


CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}
CARD = Device(name="a card", total_bytes=24 * GIB, free_bytes=24 * GIB, compute_capability=(8, 9))


def one_gib_and_a_mib_a_token(
    run: RunDescription,
    shape: object,
    *,
    software: Software,
    card: Card,
    length: int | None = None,
    eval_length: int | None = None,
    ranks: object = None,
    images: object = None,
) -> MemoryEstimate:
    """Stands for the real estimate, so that these tests are about what is made of it."""
    peak = GIB + (length or run.cutoff_len) * MIB
    parts = dict.fromkeys(("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers"), 0)
    return MemoryEstimate(
        phases={"load": GIB, "forward_backward": peak, "optimizer_step": GIB, "save": GIB, "evaluate": 0},
        components=parts
        | {"weights": GIB, "adapters": MIB, "optimizer": 2 * MIB, "activations": peak - GIB - 3 * MIB},
        peak_allocated_bytes=peak,
        low_bytes=peak,
        high_bytes=peak,
        slack_bytes=0,
        host_bytes=2 * GIB,
        tokens_per_step=run.cutoff_len,
        reasons=(f"The estimate was asked for {card}.",),
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for variable in ("FORCE_TORCHRUN", "LOCAL_RANK", "ALLOW_EXTRA_ARGS", "LLAMAFACTORY_PREFLIGHT_GPU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("LLAMAFACTORY_PREFLIGHT", raising=False)
    monkeypatch.setattr(memory, "estimate", one_gib_and_a_mib_a_token)
    monkeypatch.setattr(device, "visible", lambda environ=None: ())
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(host, "main_memory", lambda: None)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def ids(found: Iterator[Finding] | tuple[Finding, ...]) -> set[str]:
    return {finding.id for finding in found}


@pytest.mark.parametrize(("gpu", "word", "code"), [("24GiB", "fits", 0), ("2GiB", "will_not_fit", 1)])
def test_a_mapping_against_a_planned_card(model: str, gpu: str, word: str, code: int) -> None:
    result = preflight.check({"model_name_or_path": model, "do_train": True, "cutoff_len": 2048}, gpu=gpu)
    assert (result.verdict.word, result.exit_code) == (word, code)


def test_a_file_with_overrides(model: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"model_name_or_path: {model}\ndo_train: true\ncutoff_len: 2048\n")
    assert preflight.check(file, overrides=["cutoff_len=100"], gpu="2GiB").verdict.word == "fits"
    assert preflight.check(str(file), gpu="2GiB").verdict.word == "will_not_fit"


def test_free_is_what_the_allocator_may_use(model: str) -> None:
    given = {"model_name_or_path": model, "do_train": True, "cutoff_len": 1024}
    assert preflight.check(given, free="2GiB").verdict.word == "fits"
    assert preflight.check(given, free="1.99GiB").verdict.word == "will_not_fit"


def test_the_variable_plans_where_no_option_does(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "2GiB")
    given = {"model_name_or_path": model, "do_train": True, "cutoff_len": 2048}
    assert preflight.check(given).verdict.word == "will_not_fit"
    assert preflight.check(given, gpu="24GiB").verdict.word == "fits"


def test_neither_a_gpu_nor_a_plan(model: str) -> None:
    with pytest.raises(UserError, match="--gpu 24GiB"):
        preflight.check({"model_name_or_path": model, "do_train": True})
    result = preflight.check({"model_name_or_path": model, "do_train": True, "use_cpu": True})
    assert (result.verdict.word, result.device) == ("fits", None)


def test_the_host_verdict_of_a_run_on_the_cpu(model: str) -> None:
    given = {"model_name_or_path": model, "do_train": True, "use_cpu": True}
    for amount, word in (("1GiB", "will_not_fit"), ("1.9GiB", "tight"), ("2GiB", "fits")):
        assert preflight.check(given, host_ram=amount).verdict.word == word


def test_on_unequal_cards_the_smallest_free_one_decides(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (CARD, dataclasses.replace(CARD, name="another", index=1, free_bytes=2 * GIB))
    monkeypatch.setattr(device, "visible", lambda environ=None: cards)
    given = {"model_name_or_path": model, "do_train": True, "cutoff_len": 2048}
    result = preflight.check(given)
    assert (result.verdict.word, result.device) == ("will_not_fit", cards[1])
    assert preflight.check(given, device=0).verdict.word == "fits"
    assert preflight.check(given, gpus=1).devices == cards[:1]
    for wrong in ({"device": 2}, {"gpus": 3}, {"gpus": 0}, {"device": 0, "gpu": "24GiB"}):
        with pytest.raises(UserError):
            preflight.check(given, **wrong)


@pytest.mark.parametrize(
    ("env", "num_gpus", "expandable"),
    [
        ({}, 1, True),
        ({"LLAMAFACTORY_PREFLIGHT": "off"}, 1, False),
        ({"LLAMAFACTORY_PREFLIGHT": "off"}, 2, True),
        ({"LLAMAFACTORY_PREFLIGHT": "off", "OPTIM_TORCH": "0"}, 2, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, 1, False),
        ({"FORCE_TORCHRUN": "1"}, 1, True),
        ({"FORCE_TORCHRUN": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, 1, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments: True"}, 1, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 1, True),
    ],
)
def test_the_allocator_is_seen_as_the_training_will_find_it(
    model: str, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], num_gpus: int, expandable: bool
) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OPTIM_TORCH", "LLAMAFACTORY_PREFLIGHT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(device, "visible", lambda environ=None: (CARD,) * num_gpus)
    result = preflight.check({"model_name_or_path": model, "do_train": True})
    assert result.estimate is not None
    card = Card(expandable_segments=expandable, compute_capability=(8, 9))
    assert result.estimate.reasons == (f"The estimate was asked for {card}.",)


def test_a_card_of_unknown_size_is_not_judged(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device, "visible", lambda environ=None: (Device(name="MIG-1", total_bytes=None, free_bytes=None),)
    )
    result = preflight.check({"model_name_or_path": model, "do_train": True})
    assert (result.verdict.word, result.exit_code) == ("unknown", 2)


def test_an_unknown_architecture_is_not_judged(model: str) -> None:
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard_of"}))
    result = preflight.check({"model_name_or_path": model, "do_train": True}, gpu="24GiB")
    assert (result.verdict.word, result.exit_code) == ("unknown", 2)
    assert "unheard_of" in report.text(result)


def test_a_hub_that_cannot_be_reached_is_not_judged(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    result = preflight.check({"model_name_or_path": "someone/tiny"}, gpu="24GiB")
    assert (result.verdict.word, result.exit_code) == ("unknown", 2)
    assert "cannot be reached" in report.text(result)


def test_deepspeed_on_one_gpu_needs_torchrun(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model_name_or_path": model, "do_train": True, "deepspeed": {"zero_optimization": {"stage": 2}}}
    result = preflight.check(given, gpu="24GiB")
    assert "deepspeed-needs-torchrun" in ids(result.findings)
    assert result.exit_code == 2
    assert "FORCE_TORCHRUN=1" in " ".join(report.text(result).split())
    assert "deepspeed-needs-torchrun" not in ids(preflight.check(given, gpu="24GiB", gpus=2).findings)
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    assert preflight.check(given, gpu="24GiB").exit_code == 0


def test_a_faulty_deepspeed_plan_is_the_users_error(model: str) -> None:
    with pytest.raises(UserError, match="stage"):
        preflight.check(
            {"model_name_or_path": model, "do_train": True, "deepspeed": {"zero_optimization": {"stage": 9}}},
            gpu="24GiB",
        )


def test_extra_arguments_are_legal_when_allowed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model_name_or_path": model, "do_train": True, "something_of_mine": 1}
    with pytest.raises(UserError, match="something_of_mine"):
        preflight.check(given, gpu="24GiB")
    monkeypatch.setenv("ALLOW_EXTRA_ARGS", "1")
    assert preflight.check(given, gpu="24GiB").exit_code == 0


def test_a_device_that_nothing_was_measured_on_is_judged_with_wide_bounds(model: str) -> None:
    def judged(kind: device.Kind) -> tuple[str, set[str]]:
        size = 3 * GIB + CARD.context_bytes
        card = dataclasses.replace(CARD, kind=kind, total_bytes=size, free_bytes=size)
        given = {"model_name_or_path": model, "do_train": True, "cutoff_len": 2048}
        result = preflight.examine(given, origin="x", beside=None, devices=(card,), host_budget_bytes=None)
        return result.verdict.word, ids(result.findings)

    assert judged("cuda") == ("fits", set())
    assert judged("rocm") == ("tight", {"device-not-measured"})


class TestGuard:
    """`guard.train`, which the hook calls before a training starts."""

    def guard(self, **arguments: Any) -> None:
        guard.train(arguments, stage="process")

    def test_a_run_that_fits_goes_on_with_a_report(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "24GiB")
        self.guard(model_name_or_path=model)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "FITS: needs" in captured.err

    def test_block_stops_what_fits_at_no_length(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "1GiB")
        with pytest.raises(SystemExit) as caught:
            self.guard(model_name_or_path=model)
        assert caught.value.code == 1
        assert report.REFUSAL in capsys.readouterr().err

    def test_what_may_fit_with_shorter_samples_goes_on(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "2GiB")
        self.guard(model_name_or_path=model, cutoff_len=4096)
        error = capsys.readouterr().err
        assert "WILL NOT FIT" in error and report.LENGTH_DECIDES in error
        with pytest.raises(SystemExit):  # packing fills every sequence
            self.guard(model_name_or_path=model, cutoff_len=4096, neat_packing=True)

    def test_a_faulty_card_in_the_variable_leaves_no_run_unchecked(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_WARNED", "")
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "24")
        self.guard(model_name_or_path=model)
        error = capsys.readouterr().err
        assert "'24' has no unit (LLAMAFACTORY_PREFLIGHT_GPU). Write 24GiB. For now it counts as not set." in error
        assert "a run on the CPU needs" in error
        with pytest.raises(UserError, match="has no unit"):
            preflight.check({"model_name_or_path": model, "do_train": True})

    def test_warn_only_says_so(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "1GiB")
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT", "warn")
        self.guard(model_name_or_path=model)
        assert "WILL NOT FIT" in capsys.readouterr().err

    def test_a_run_on_the_cpu_is_never_stopped(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(host, "available_bytes", lambda: MIB)
        self.guard(model_name_or_path=model)
        assert "WILL NOT FIT: a run on the CPU needs 2.00 GiB" in capsys.readouterr().err

    def test_an_unknown_run_is_never_stopped(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard_of"}))
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "1GiB")
        self.guard(model_name_or_path=model)
        assert "UNKNOWN" in capsys.readouterr().err

    def test_the_data_says_how_many_checkpoints_there_will_be(
        self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT_GPU", "24GiB")
        monkeypatch.setattr(host, "free_disk_bytes", lambda path: 64 * MIB)
        given = {"model_name_or_path": model, "do_train": True, "output_dir": "out", "save_steps": 1}
        for samples, is_told in ((8, False), (8000, True)):
            guard.data(given, Longest(tokens=100, index=0, num_samples=samples), speaks=True)
            assert ("error: The run writes about" in capsys.readouterr().err) == is_told
        guard.data(given, Longest(tokens=100, index=0, num_samples=8000), speaks=False)
        assert capsys.readouterr().err == ""
