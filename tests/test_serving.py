"""What chat and export were measured to take, against what is predicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import device, memory, preflight
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import from_arguments


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy  # noqa: E402


FOLDER = accuracy.MEASURED / "serving"
PLAN = json.loads((FOLDER / "cases.json").read_text())
MEASURED = {row["id"]: row for row in map(json.loads, (FOLDER / "served.jsonl").read_text().splitlines())}
GIB = 2**30


def estimate(case: dict[str, Any]) -> memory.MemoryEstimate:
    given = case["args"] | {"model_name_or_path": case["model"], "template": "qwen3_nothink"}
    given |= {"adapter_name_or_path": "adapter"} if case["adapter"] else {}
    given |= {"export_dir": "merged"} if case["task"] == "export" else {}
    run = from_arguments(given, software=accuracy.SOFTWARE, origin=case["id"])
    card = memory.Card(compute_capability=(9, 0))
    return memory.inference_estimate(
        run, ModelShape.from_config(PLAN["models"][case["model"]]), software=accuracy.SOFTWARE, card=card
    )


@pytest.mark.parametrize("case", PLAN["cases"], ids=lambda case: str(case["id"]))
def test_the_card_takes_what_was_predicted(case: dict[str, Any]) -> None:
    found, row = estimate(case), MEASURED[case["id"]]
    measured = max(row["peak_allocated_gib"], row["load_peak_allocated_gib"])
    if found.peak_allocated_bytes == 0:
        assert measured < 0.2  # the merge is on the CPU; LLaMA-Factory still starts CUDA
    else:
        assert found.peak_allocated_bytes / GIB == pytest.approx(measured, rel=0.01)
        assert found.low_bytes <= measured * GIB <= found.high_bytes


def test_a_merge_on_the_cpu_takes_main_memory() -> None:
    (case,) = (case for case in PLAN["cases"] if case["id"] == "export_8b_adapter_cpu")
    assert estimate(case).host_bytes / GIB == pytest.approx(MEASURED[case["id"]]["host_peak_rss_gib"], rel=0.05)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(device, "visible", lambda environ=None: ())
    (tmp_path / "config.json").write_text(json.dumps(PLAN["models"][PLAN["cases"][0]["model"]]))
    return str(tmp_path)


def test_a_merge_on_the_cpu_is_judged_by_main_memory_alone(model: str) -> None:
    given = {"model_name_or_path": model, "adapter_name_or_path": "a", "export_dir": "merged", "template": "qwen3"}
    words = [preflight.check(given, host_ram=amount).verdict.word for amount in ("4GiB", "64GiB")]
    assert words == ["will_not_fit", "fits"]
    planned = preflight.check(given, gpu="24GiB", host_ram="4GiB")
    assert (planned.verdict.word, planned.device) == ("will_not_fit", None)
    assert planned.estimate is not None and sum(planned.estimate.components.values()) > 2 * GIB


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"export_dir": "merged", "export_quantization_bit": 4}, "export_quantization_bit"),
        ({"use_kt": True}, "use_kt"),
        ({"do_predict": True, "predict_with_generate": True, "finetuning_type": "full"}, "without training"),
        ({"do_eval": True, "eval_dataset": "identity", "output_dir": "out"}, "without training"),
    ],
)
def test_what_has_no_formula_is_never_judged(model: str, settings: dict[str, Any], reason: str) -> None:
    result = preflight.check({"model_name_or_path": model, "template": "qwen3"} | settings, gpu="1GiB")
    assert result.verdict.word == "unknown" and reason in result.verdict.reasons[0]


@pytest.mark.parametrize("variable", ["USE_V1", "USE_MCA"])
def test_other_code_in_the_environment_has_no_formula(
    model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    result = preflight.check({"model_name_or_path": model, "do_train": True}, gpu="24GiB")
    assert result.verdict.word == "unknown" and variable in result.verdict.reasons[0]
