from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from llamafactory_preflight import report, verdict
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.device import Device, Process
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB
from llamafactory_preflight.verdict import Verdict


COMPONENTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")
PHASES = ("load", "forward_backward", "optimizer_step", "save", "evaluate")
ESTIMATE = MemoryEstimate(
    phases=dict(zip(PHASES, (15 * GIB, 17 * GIB, 16 * GIB, 15 * GIB, 18 * GIB), strict=True)),
    components=dict(zip(COMPONENTS, (15 * GIB, GIB // 4, GIB // 4, GIB // 2, GIB, 0, 0), strict=True)),
    peak_allocated_bytes=17 * GIB,
    low_bytes=int(16.5 * GIB),
    high_bytes=int(17.5 * GIB),
    slack_bytes=GIB // 4,
    host_bytes=6 * GIB,
    tokens_per_step=4096,
    reasons=("The optimizer is fused.",),
)
CARD = Device(name="NVIDIA GeForce RTX 4090", total_bytes=24 * GIB, free_bytes=23 * GIB)
RESULT = Result(
    origin="presets/24gb_lora.yaml",
    run=RunDescription(model_name_or_path="Qwen/Qwen3-8B", bf16=True, packing=True, cutoff_len=4096),
    software=Software(torch="2.9.1"),
    shape=None,
    estimate=ESTIMATE,
    device=CARD,
    devices=(CARD,),
    host_budget_bytes=60 * GIB,
    verdict=Verdict(word="fits", reasons=("Because.",)),
    findings=(Finding(id="x", severity="warning", message="It takes {amount}. " * 8, amounts={"amount": GIB}),),
    resolved=("`dataset_dir` was found in the installed pack: /some/where",),
)


def amounts(text: str) -> dict[str, float]:
    """The figures of the table by the name at the start of their line."""
    _, table, _ = text.split("\n\n")
    rows = (line.split(" GiB")[0].rsplit(maxsplit=1) for line in table.splitlines() if " GiB" in line)
    return {name.strip(): float(figure) for name, figure in rows}


def test_the_table_says_every_component_and_adds_up() -> None:
    figures = amounts(report.text(RESULT))
    assert sum(figures.get(name, 0) for name in COMPONENTS) == figures["peak"] == 17.0
    assert "logits" not in figures, "a row that says nothing"
    more = figures["evaluate on top"]
    assert more == 1.0
    total = figures["peak"] + figures["allocator slack"] + figures["CUDA context"] + more
    assert figures["needed"] == pytest.approx(total, abs=0.011)
    assert figures["GPU has free"] == 23.0
    low, high = verdict.need_bounds(ESTIMATE, context_bytes=CARD.context_bytes)
    assert f"({low / GIB:.2f} to {high / GIB:.2f})" in report.text(RESULT)


def test_it_is_readable_in_80_columns_without_colour() -> None:
    text = report.text(RESULT)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.isascii() and text.isprintable() is False and "\x1b" not in text
    assert len(text.splitlines()) < 40


def test_what_was_asked_found_and_resolved_is_there() -> None:
    words = " ".join(report.text(RESULT).split())
    for part in (
        "presets/24gb_lora.yaml",
        "Qwen/Qwen3-8B, sft LoRA rank 8, bf16, batch 8 x 1, 4096 tokens packed",
        "FITS: needs 18.70 GiB and has 23.00 GiB. Because.",
        "warning: It takes 1.00 GiB.",
        "main memory 6.00 GiB of 60.00 GiB available",
        "was found in the installed pack: /some/where",
    ):
        assert part in words


def test_a_run_on_the_cpu_has_no_gpu_rows() -> None:
    estimate = dataclasses.replace(ESTIMATE, host_bytes=20 * GIB)
    text = report.text(dataclasses.replace(RESULT, device=None, devices=(), estimate=estimate))
    assert "CUDA" not in text and "GPU" not in text
    figures = amounts(text)
    assert figures["peak"] + figures["Python, libraries"] == figures["needed"] == 20.0
    assert figures["main memory free"] == 60.0
    assert "FITS: a run on the CPU needs 20.00 GiB and has 60.00 GiB. Because." in " ".join(text.split())


def test_an_unknown_run_has_no_table() -> None:
    result = dataclasses.replace(RESULT, estimate=None, verdict=Verdict(word="unknown", reasons=("No formula.",)))
    text = report.text(result)
    assert "UNKNOWN: No formula." in text and "peak" not in text
    loaded = json.loads(report.as_json(result))
    assert loaded["gpu"] is None and loaded["calibrated"] is False
    assert loaded["verdict"] == "unknown" and loaded["reasons"][0] == "No formula."


def test_json_is_schema_1_on_one_line() -> None:
    line = report.as_json(RESULT)
    assert "\n" not in line
    loaded = json.loads(line)
    assert tuple(loaded) == (
        "schema", "versions", "calibrated", "file", "model", "method", "tokens_per_step", "gpu", "host", "verdict",
        "reasons", "remedies", "findings",
    )  # fmt: skip
    assert tuple(loaded["gpu"]) == (
        "peak_allocated_bytes", "needed_bytes", "budget_bytes", "phases", "components", "context_bytes", "nccl_bytes",
        "low_bytes", "high_bytes", "devices",
    )  # fmt: skip
    assert (loaded["schema"], loaded["calibrated"], loaded["remedies"]) == (1, True, [])
    assert (loaded["file"], loaded["model"]) == ("presets/24gb_lora.yaml", "Qwen/Qwen3-8B")
    assert (loaded["method"], loaded["tokens_per_step"], loaded["verdict"]) == ("lora", 4096, "fits")
    gpu = loaded["gpu"]
    assert tuple(gpu["phases"]) == PHASES
    assert tuple(gpu["components"]) == COMPONENTS
    assert sum(gpu["components"].values()) == gpu["peak_allocated_bytes"]
    assert gpu["needed_bytes"] == 18 * GIB + ESTIMATE.slack_bytes + gpu["context_bytes"]
    assert gpu["budget_bytes"] == 23 * GIB
    assert gpu["low_bytes"] < gpu["peak_allocated_bytes"] < gpu["high_bytes"]
    assert loaded["host"] == {"peak_bytes": 6 * GIB, "budget_bytes": 60 * GIB}
    assert loaded["versions"]["torch"] == "2.9.1"
    assert loaded["findings"][0]["id"] == "x" and "1.00 GiB" in loaded["findings"][0]["message"]


def test_faulty_input_has_the_same_keys() -> None:
    line = report.error_as_json(UserError("It is wrong"), origin="a.yaml", versions={})
    loaded = json.loads(line)
    assert loaded.keys() == json.loads(report.as_json(RESULT)).keys()
    assert loaded["verdict"] == "unknown"
    assert loaded["findings"] == [{"id": "bad-input", "severity": "error", "message": "It is wrong."}]


@pytest.mark.parametrize(
    ("word", "severity", "code"),
    [
        ("fits", "warning", 0),
        ("tight", "info", 0),
        ("will_not_fit", "warning", 1),
        ("unknown", "info", 2),
        ("fits", "error", 2),
        ("will_not_fit", "error", 2),
    ],
)
def test_exit_codes(word: str, severity: str, code: int) -> None:
    finding = dataclasses.replace(RESULT.findings[0], severity=severity)
    result = dataclasses.replace(RESULT, verdict=Verdict(word=word, reasons=()), findings=(finding,))
    assert result.exit_code == code


@pytest.mark.parametrize(
    ("arguments", "method"),
    [({}, "lora"), ({"quantization_bit": 4}, "qlora"), ({"finetuning_type": "full"}, "full")],
)
def test_methods(arguments: dict[str, object], method: str, tmp_path: Path) -> None:
    assert report.method(RunDescription(**arguments)) == method


def test_remedies_are_lines_to_paste_and_say_what_they_take_and_cost() -> None:
    smaller = dataclasses.replace(ESTIMATE, peak_allocated_bytes=9 * GIB, phases=dict.fromkeys(PHASES, 9 * GIB))
    changed = {"enable_liger_kernel": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    remedy = Remedy(set=changed, costs="some speed", estimate=smaller)
    result = dataclasses.replace(RESULT, remedies=(remedy,))
    lines = report.text(result).splitlines()
    line = "    enable_liger_kernel=true per_device_train_batch_size=1 gradient_accumulation_steps=16"
    assert lines[lines.index(line) + 1] == "      takes 9.00 GiB; costs some speed"
    assert json.loads(report.as_json(result))["remedies"] == [
        {"set": changed, "peak_allocated_bytes": 9 * GIB, "costs": "some speed"}
    ]


def test_a_card_is_named_by_both_of_its_numbers_where_they_differ() -> None:
    other = dataclasses.replace(CARD, physical_index=5, uuid="GPU-5", processes=(Process(pid=7, used_bytes=GIB),))
    result = dataclasses.replace(RESULT, device=other, devices=(other,))
    assert "GPU 0 = nvidia-smi 5, NVIDIA GeForce RTX 4090" in report.text(result)
    longer = dataclasses.replace(other, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    text = report.text(dataclasses.replace(result, device=longer, devices=(longer,)))
    assert "\n    GPU 0 = nvidia-smi 5, NVIDIA A100-SXM4-80GB MIG 3g.40gb\n" in text
    assert max(map(len, text.splitlines())) <= 80
    same = dataclasses.replace(other, physical_index=0)
    assert "GPU 0, NVIDIA" in report.text(dataclasses.replace(RESULT, device=same, devices=(same,)))
    (told,) = json.loads(report.as_json(result))["gpu"]["devices"]
    assert (told["index"], told["physical_index"], told["uuid"], told["kind"]) == (0, 5, "GPU-5", "cuda")
    assert told["processes"] == [{"pid": 7, "name": None, "used_bytes": GIB}]


def test_a_device_that_was_not_measured_is_not_called_calibrated() -> None:
    other = dataclasses.replace(CARD, kind="rocm")
    result = dataclasses.replace(RESULT, device=other, devices=(other,))
    assert json.loads(report.as_json(result))["calibrated"] is False
    assert json.loads(report.as_json(RESULT))["calibrated"] is True
    assert "HIP context" in report.text(result) and "CUDA" not in report.text(result)


def test_where_nothing_helps_the_report_says_so() -> None:
    lost = dataclasses.replace(RESULT, verdict=Verdict(word="will_not_fit", reasons=("Too much.",)))
    assert report.NO_REMEDY in report.text(lost).splitlines()
    assert len(report.NO_REMEDY) <= 80
    assert report.NO_REMEDY not in report.text(RESULT)
