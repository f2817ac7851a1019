"""Each finding, provoked: by what is asked for, and by a machine as it was recorded where this one cannot."""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import device, preflight, report
from llamafactory_preflight.device import Device, Process, Survey
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.findings import arguments, bad_pairs, hardware, nvme, packages, together
from llamafactory_preflight.findings import host as host_findings
from llamafactory_preflight.machine import host
from llamafactory_preflight.machine.host import MainMemory
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB


CARD = Device(name="a card", total_bytes=24 * GIB, free_bytes=24 * GIB, compute_capability=(8, 9))
V100 = Device(name="Tesla V100", total_bytes=32 * GIB, free_bytes=32 * GIB, compute_capability=(7, 0))
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")
ESTIMATE = MemoryEstimate(
    phases={"load": GIB, "forward_backward": 2 * GIB, "optimizer_step": GIB, "save": GIB, "evaluate": 0},
    components=dict.fromkeys(PARTS, 0),
    peak_allocated_bytes=2 * GIB,
    low_bytes=2 * GIB,
    high_bytes=2 * GIB,
    slack_bytes=0,
    host_bytes=8 * GIB,
    tokens_per_step=1,
    reasons=(),
)
WITH_FLASH = Software(flash_attn="2.8.3")
PINNED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}


EMBEDDING_OF_155_MILLION = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def told(found: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.id: finding for finding in found}


def words(finding: Finding) -> str:
    text = report.message(finding)
    assert "{" not in text and "}" not in text, "an amount without a figure"
    return text


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"transformers": "5.6.0", "flash_attn": "2.8.3"}, {"transformers-5.6.0-fa2"}),
        ({"transformers": "5.6.1", "flash_attn": "2.8.3"}, set()),
        ({"transformers": "5.6.0"}, set()),
        ({"llamafactory": "0.9.4", "deepspeed": "0.17.0"}, {"deepspeed-too-new"}),
        ({"llamafactory": "0.9.4", "deepspeed": "0.16.9"}, set()),
        ({"llamafactory": "0.9.5", "deepspeed": "0.19.0"}, set()),
        ({"llamafactory": "0.9.6.dev0", "deepspeed": "0.18.5"}, {"deepspeed-too-new"}),
        ({"llamafactory": "0.9.6.dev0", "deepspeed": "0.18.4"}, set()),
    ],
)
def test_known_bad_pairs(versions: dict[str, str], found: set[str]) -> None:
    assert told(bad_pairs(Software(**versions))).keys() == found


def test_bad_pairs_that_a_run_does_not_use_are_not_told() -> None:
    software = Software(transformers="5.6.0", flash_attn="2.8.3", llamafactory="0.9.4", deepspeed="0.17.0")
    assert told(bad_pairs(software, RunDescription())) == {}
    used = RunDescription(flash_attn="fa2", deepspeed={})
    assert told(bad_pairs(software, used)).keys() == {"transformers-5.6.0-fa2", "deepspeed-too-new"}


def test_what_a_run_needs_and_is_not_installed() -> None:
    run = RunDescription(deepspeed={}, quantization_bit=4, enable_liger_kernel=True, flash_attn="fa2")
    missing = {"deepspeed-missing", "bitsandbytes-missing", "liger-kernel-missing", "flash-attn-missing"}
    found = told(packages.missing_packages(run, Software()))
    assert found.keys() == missing
    assert found["flash-attn-missing"].set == {"flash_attn": "sdpa"}
    installed = Software(deepspeed="1", bitsandbytes="1", liger_kernel="1", flash_attn="1")
    assert told(packages.missing_packages(run, installed)) == {}
    assert "flash-attn-missing" not in told(
        packages.missing_packages(run, Software(), dataclasses.replace(CARD, kind="npu"))
    ), "torch_npu has its own"
    assert "flash-attn-missing" not in told(packages.missing_packages(run, Software(), V100)), "it would be of no use"


@pytest.mark.parametrize(
    ("asked", "capability", "found", "remedy"),
    [
        ({"bf16": True}, (7, 0), "no-bf16", {"bf16": False, "fp16": True}),
        ({"pure_bf16": True}, (7, 5), "no-bf16", {"pure_bf16": False, "fp16": True}),
        ({"flash_attn": "fa2"}, (7, 5), "no-fa2", {"flash_attn": "sdpa"}),
        ({"fp16": True}, (8, 6), "fp16-where-bf16", {"fp16": False, "bf16": True}),
        ({"bf16": True, "flash_attn": "fa2"}, (8, 0), None, None),
        ({"fp16": True, "flash_attn": "sdpa"}, (7, 0), None, None),
    ],
)
def test_what_a_generation_of_cards_lacks(
    asked: dict[str, Any], capability: tuple[int, int], found: str | None, remedy: dict[str, Any] | None
) -> None:
    findings = told(
        hardware.card(RunDescription(**asked), dataclasses.replace(CARD, compute_capability=capability), WITH_FLASH)
    )
    assert list(findings) == ([found] if found else [])
    assert [finding.set for finding in findings.values()] == ([remedy] if remedy else [])


def test_flash_attention_that_is_not_installed_fails_on_no_card() -> None:
    run = RunDescription(flash_attn="fa2")
    (installed,) = hardware.card(run, V100, WITH_FLASH)
    (missing,) = hardware.card(run, V100, Software())
    assert (installed.severity, missing.severity) == ("error", "warning")


def test_nothing_is_said_of_a_generation_that_is_not_known() -> None:
    run = RunDescription(bf16=True, flash_attn="fa2")
    assert told(hardware.card(run, dataclasses.replace(CARD, compute_capability=None), WITH_FLASH)) == {}
    amd = dataclasses.replace(CARD, kind="rocm", compute_capability=None)
    assert told(hardware.card(run, amd, WITH_FLASH)).keys() == {"device-not-measured"}


def test_who_else_is_on_the_card_is_named_with_what_he_holds() -> None:
    processes = (
        Process(pid=308335, name="python serve.py", used_bytes=41 * GIB),
        Process(pid=4711, used_bytes=2 * GIB),
        Process(pid=12),
    )
    busy = dataclasses.replace(CARD, total_bytes=80 * GIB, free_bytes=34 * GIB, processes=processes)
    (found,) = hardware.card(RunDescription(), busy, WITH_FLASH)
    assert words(found) == (
        "46.00 GiB of GPU 0 are in use by something else: python serve.py (PID 308335) with 41.00 GiB; PID 4711 with "
        "2.00 GiB; PID 12; 3.00 GiB of processes that cannot be seen from here (another container or user)."
    )


def test_who_is_on_the_card_matters_where_the_run_does_not_fit() -> None:
    busy = dataclasses.replace(CARD, free_bytes=4 * GIB)
    (found,) = hardware.card(RunDescription(), busy, WITH_FLASH, fits=False)
    assert found.severity == "warning" and found.message.endswith("choose another card with CUDA_VISIBLE_DEVICES.")
    (found,) = hardware.card(RunDescription(), busy, WITH_FLASH)
    assert found.severity == "info" and "End it" not in found.message


def test_in_a_container_that_shows_nobody_the_amount_is_told() -> None:
    (found,) = hardware.card(RunDescription(), dataclasses.replace(CARD, free_bytes=4 * GIB), WITH_FLASH)
    assert "20.00 GiB of processes that cannot be seen from here" in words(found)


def test_many_holders_and_odd_names_stay_short_and_harmless() -> None:
    processes = tuple(Process(pid=pid, name="{taken} {x}", used_bytes=GIB) for pid in range(1, 12))
    (found,) = hardware.card(
        RunDescription(), dataclasses.replace(CARD, free_bytes=13 * GIB, processes=processes), WITH_FLASH
    )
    text = report.message(found)
    assert "(taken) (x) (PID 1) with 1.00 GiB" in text and "6 more" in text and len(text) < 400


def test_a_driver_that_says_of_nobody_how_much_he_holds() -> None:
    processes = (Process(pid=7, name="explorer.exe"), Process(pid=8))
    (found,) = hardware.card(
        RunDescription(), dataclasses.replace(CARD, free_bytes=13 * GIB, processes=processes), WITH_FLASH
    )
    assert words(found) == "11.00 GiB of GPU 0 are in use by something else: explorer.exe (PID 7); PID 8."


def test_a_planned_card_and_a_desktops_share_are_not_in_use() -> None:
    assert (
        told(hardware.card(RunDescription(), dataclasses.replace(CARD, free_bytes=10 * GIB, planned=True), WITH_FLASH))
        == {}
    )
    assert told(hardware.card(RunDescription(), dataclasses.replace(CARD, free_bytes=23 * GIB + 1), WITH_FLASH)) == {}


def test_checkpointing_that_the_trainer_turns_on_again() -> None:
    def of(**asked: Any) -> list[str]:
        return list(told(arguments.checkpointing(RunDescription(**asked))))

    assert of(gradient_checkpointing=True, disable_gradient_checkpointing=True) == ["checkpointing-not-disabled"]
    assert of(gradient_checkpointing=True, use_reentrant_gc=False) == ["checkpointing-reentrant"]
    assert of(gradient_checkpointing=True) == of(disable_gradient_checkpointing=True, use_reentrant_gc=False) == []


@pytest.mark.parametrize(
    ("asked", "version", "fails"),
    [
        ({}, "0.18.4", True),
        ({"quantization_bit": 4}, "0.19.2", True),
        ({}, "0.19.3", False),
        ({}, None, False),
        ({"finetuning_type": "full"}, "0.18.4", False),
        ({"use_reentrant_gc": True}, "0.18.4", False),
        ({"use_unsloth_gc": True}, "0.18.4", False),
        ({"disable_gradient_checkpointing": True}, "0.18.4", False),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "0.18.4", False),
    ],
)
def test_checkpointing_that_finds_no_frozen_norms_under_zero_3(
    asked: dict[str, Any], version: str | None, fails: bool
) -> None:
    zero3 = {"deepspeed": {"zero_optimization": {"stage": 3}}, "use_reentrant_gc": False}
    run, software = RunDescription(**zero3 | asked), Software(deepspeed=version)
    found = list(arguments.checkpointing_of_shards(run, software))
    assert [(finding.severity, finding.set) for finding in found] == [("error", {"use_reentrant_gc": True})] * fails


def test_an_evaluation_that_keeps_its_predictions_on_the_card() -> None:
    def of(**asked: Any) -> list[str]:
        return list(told(arguments.evaluation(RunDescription(**asked), None)))

    assert of(do_eval=True, compute_accuracy=True) == ["eval-accumulates"]
    assert of(do_predict=True, predict_with_generate=True) == ["eval-accumulates"]
    assert of(do_eval=True) == [], "without metrics it keeps losses"
    assert of(compute_accuracy=True) == [], "nothing is evaluated"
    assert of(do_eval=True, compute_accuracy=True, eval_accumulation_steps=1) == []
    assert of(do_eval=True, compute_accuracy=True, prediction_loss_only=True) == []


def test_an_evaluation_that_takes_more_than_training() -> None:
    larger = dataclasses.replace(ESTIMATE, phases={**ESTIMATE.phases, "evaluate": 5 * GIB})
    (found,) = arguments.evaluation(RunDescription(do_eval=True), larger)
    assert (
        found.set == {"per_device_eval_batch_size": 1} and "5.00 GiB" in words(found) and "batch is 8" in found.message
    )
    assert told(arguments.evaluation(RunDescription(do_eval=True, per_device_eval_batch_size=1), larger)) == {}
    assert told(arguments.evaluation(RunDescription(do_eval=True), ESTIMATE)) == {}


def test_experts_that_stay_in_16_bit() -> None:
    run, five, four = (
        RunDescription(quantization_bit=4),
        Software(transformers="5.6.0"),
        Software(transformers="4.57.1"),
    )
    assert list(told(arguments.experts(run, has_experts=True, software=five))) == ["experts-not-quantized"]
    assert told(arguments.experts(run, has_experts=True, software=four)) == {}
    assert told(arguments.experts(run, has_experts=False, software=five)) == {}
    assert told(arguments.experts(RunDescription(), has_experts=True, software=five)) == {}


def test_attention_without_a_kernel() -> None:
    assert list(told(arguments.eager_attention(RunDescription(flash_attn="disabled")))) == ["eager-attention"]
    assert told(arguments.eager_attention(RunDescription())) == {}


def test_more_workers_than_cores() -> None:
    (found,) = host_findings.workers(RunDescription(preprocessing_num_workers=512))
    assert found.set == {"preprocessing_num_workers": host_findings.available_cores()} and "=512" in found.message
    for number in (None, 1, 4, 8):
        assert told(host_findings.workers(RunDescription(preprocessing_num_workers=number), cores=4)) == {}


def test_fa3_that_is_a_value_and_is_refused() -> None:
    def of(model_type: str, version: str | None, flash_attn: str = "fa3") -> list[str]:
        run, software = RunDescription(flash_attn=flash_attn), Software(llamafactory=version)
        return list(told(arguments.flash_attention_3(run, model_type=model_type, software=software)))

    assert of("qwen3", "0.9.5") == of("qwen3", "0.9.4") == ["fa3-refused"]
    assert (
        of("gpt_oss", "0.9.5") == of("qwen3", "0.9.6.dev0") == of("qwen3", None) == of("qwen3", "0.9.5", "fa2") == []
    )


@pytest.mark.parametrize(("version", "found"), [("0.9.4", []), ("0.9.5", ["json-not-read"])])
def test_json_files_that_llamafactory_cannot_read(version: str, found: list[str]) -> None:
    assert list(told(arguments.json_file("a.json", Software(llamafactory=version)))) == found
    assert list(told(arguments.json_file("a.yaml", Software(llamafactory=version)))) == []


def test_main_memory_of_a_container() -> None:
    here = MainMemory(
        available_bytes=10 * GIB, total_bytes=100 * GIB, limit_bytes=16 * GIB, limited_by=Path("/sys/fs/cgroup")
    )
    (found,) = host_findings.host_memory(ESTIMATE, 10 * GIB, here)
    assert (found.id, found.severity) == ("host-limited", "info")
    assert "16.00 GiB of the machine's 100.00 GiB of main memory, and 10.00 GiB are left" in words(found)
    (found,) = host_findings.host_memory(dataclasses.replace(ESTIMATE, host_bytes=12 * GIB), 10 * GIB, here)
    assert (found.id, found.severity) == ("host-memory", "warning")
    assert "The container or job allows 16.00 GiB in all" in words(found)
    small = dataclasses.replace(ESTIMATE, host_bytes=2 * GIB)
    assert told(host_findings.host_memory(small, 10 * GIB, here)) == {}, "it does not come near"


def test_main_memory_of_a_machine() -> None:
    here = MainMemory(available_bytes=6 * GIB, total_bytes=8 * GIB)
    (found,) = host_findings.host_memory(ESTIMATE, 6 * GIB, here)
    assert words(found) == "The run may take 8.00 GiB of main memory, and 6.00 GiB are available."
    assert told(host_findings.host_memory(ESTIMATE, 6 * GIB)).keys() == {"host-memory"}, "planned for another"
    assert told(host_findings.host_memory(ESTIMATE, None)) == told(host_findings.host_memory(None, 1, here)) == {}


@pytest.mark.parametrize(
    ("system", "wsl", "fits", "deepspeed", "found"),
    [
        ("Linux", True, False, None, ["windows-spill"]),
        ("Windows", False, False, None, ["windows-spill"]),
        ("Linux", True, True, PINNED, ["wsl-pinned"]),
        ("Windows", False, True, PINNED, []),
        ("Linux", False, False, PINNED, []),
        ("Linux", True, True, {"zero_optimization": {"offload_param": {"device": "cpu"}}}, []),
        ("Linux", True, True, {"zero_optimization": "odd"}, []),
    ],
)
def test_what_windows_does(system: str, wsl: bool, fits: bool, deepspeed: Any, found: list[str]) -> None:
    run = RunDescription(deepspeed=deepspeed)
    assert list(told(hardware.windows(run, fits=fits, environ={}, system=system, wsl=wsl))) == found


@pytest.mark.parametrize(("nodes", "is_told"), [("1", False), ("2", True), ("1:4", True), ("many", False)])
def test_infiniband_needs_locked_memory(tmp_path: Path, nodes: str, is_told: bool) -> None:
    """The limit is lowered for real, for this process, and put back."""
    (tmp_path / "mlx5_0").mkdir()
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(64 * 1024**2, *(n for n in before if n >= 0)), before[1]))
    try:
        found = told(host_findings.locked_memory({"NNODES": nodes}, infiniband=tmp_path))
        assert list(found) == (["memlock"] if is_told else [])
        assert told(host_findings.locked_memory({"NNODES": nodes}, infiniband=tmp_path / "none")) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for variable in ("FORCE_TORCHRUN", "LOCAL_RANK", "LLAMAFACTORY_PREFLIGHT_GPU", "LLAMAFACTORY_PREFLIGHT"):
        monkeypatch.delenv(variable, raising=False)
    config = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_gpu_that_torch_cannot_use_is_told_where_the_run_would_go_to_the_cpu(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = (
        "The installed torch is built without CUDA, so that LLaMA-Factory trains on the CPU: install one that has it"
    )
    monkeypatch.setattr(device, "survey", lambda environ=None: Survey(fault=fault))
    monkeypatch.setattr(device, "visible", lambda environ=None: ())
    given = {"model_name_or_path": model, "do_train": True}
    result = preflight.examine(given, origin="x", beside=None, devices=(), host_budget_bytes=64 * GIB)
    assert fault in {finding.id: finding.message for finding in result.findings}["gpu-unusable"]
    with pytest.raises(UserError, match="built without CUDA"):
        preflight.check(given)
    assert preflight.check(given | {"use_cpu": True}).findings == ()


def test_the_most_severe_comes_first(model: str) -> None:
    given = {
        "model_name_or_path": model,
        "do_train": True,
        "flash_attn": "fa2",
        "fp16": True,
        "use_reentrant_gc": False,
    }
    result = preflight.examine(
        given | {"gradient_checkpointing": True, "bf16": False},
        origin="x",
        beside=None,
        devices=(dataclasses.replace(V100, free_bytes=20 * GIB),),
        host_budget_bytes=64 * GIB,
    )
    severities = [finding.severity for finding in result.findings]
    assert severities == sorted(severities, key=together.SEVERITIES.index)
    assert {"no-fa2", "checkpointing-reentrant", "gpu-in-use"} <= {finding.id for finding in result.findings}
    assert result.exit_code == (2 if Software.installed().flash_attn else 0)
    assert ": FlashAttention-2 refuses Tesla V100" in " ".join(report.text(result).split())


def test_wsl_is_asked_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_wsl", lambda environ: True)
    assert list(told(hardware.windows(RunDescription(deepspeed=PINNED), fits=True, environ={}))) == ["wsl-pinned"]


def test_what_would_help_and_is_not_installed() -> None:
    def of(software: Software, num_gpus: int, **settings: Any) -> set[str]:
        run = RunDescription(model_name_or_path="m", **{"finetuning_type": "full"} | settings)
        return set(told(packages.would_help(run, software, model_type="qwen3", num_gpus=num_gpus)))

    liger, share, bits = "liger-kernel-would-help", "deepspeed-would-share", "bitsandbytes-would-help"
    assert of(Software(), 2) == {liger, share}
    assert of(Software(), 1) == of(Software(), 2, fsdp="full_shard auto_wrap") == {liger}
    assert of(Software(), 1, finetuning_type="lora", enable_liger_kernel=True) == {bits}
    assert of(Software(deepspeed="0.18.4", liger_kernel="0.8.5"), 2) == set()


@pytest.mark.parametrize(
    ("section", "world", "ids"),
    [
        ({"offload_param": {"device": "nvme"}}, 1, ["nvme-path", "nvme-buffer"]),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, 1, ["nvme-buffer"]),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, 2, []),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 2e8}}, 1, []),
        ({"offload_optimizer": {"device": "nvme"}}, 1, ["nvme-path"]),
        ({"offload_param": {"device": "cpu"}}, 1, []),
        ({"offload_param": None}, 1, []),
    ],
)
def test_what_offloading_to_nvme_has_to_be_told(section: dict[str, Any], world: int, ids: list[str]) -> None:
    run = RunDescription(deepspeed={"zero_optimization": {"stage": 3} | section})
    shape = ModelShape.from_config(EMBEDDING_OF_155_MILLION)
    assert [finding.id for finding in nvme.settings(run, shape, world=world)] == ids


@pytest.mark.parametrize(
    ("section", "found", "ids"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, False, ["libaio-missing"]),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, False, ["libaio-missing"]),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, True, []),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, False, []),
        (None, False, []),
    ],
)
def test_nvme_needs_libaio(section: dict[str, Any] | None, found: bool, ids: list[str]) -> None:
    run = RunDescription(deepspeed=None if section is None else {"zero_optimization": section})
    assert [finding.id for finding in packages.missing_libaio(run, found=found)] == ids
