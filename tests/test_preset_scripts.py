"""The scripts that measure presets, as far as they go without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import presets


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import compare_loss  # noqa: E402
import compare_speed  # noqa: E402
import measure_runs  # noqa: E402
import preset_runs  # noqa: E402
import qwen3_shapes  # noqa: E402
import verify_presets  # noqa: E402
from preset_runs import Run  # noqa: E402


CARD = {"count": 1, "name": "card", "total": 140 * 2**30, "capability": [9, 0]}
GOOD: dict[str, Any] = {"ok": True, "steps": 4, "peak_gib": 9.0, "predicted_gib": 9.05, "cap_gib": 11.0}


@pytest.mark.parametrize("script", ["verify_presets.py", "compare_speed.py"])
def test_without_a_gpu_there_is_one_clear_line(run: Any, tmp_path: Path, script: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "MEASURE_ROOT": str(tmp_path)}
    done = run(["python", ROOT / "scripts" / script, "12gb_lora"], env=env)
    assert done.returncode == 2
    assert "error: there is no CUDA GPU here that torch can use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "ok"),
        ({"predicted_gib": None}, "ok"),
        ({"predicted_gib": 9.2}, "prediction is off by +2.2%"),
        ({"predicted_gib": 8.0, "peak_gib": 8.0}, "ok, but uses only 73%"),
        ({"steps": 2}, "stopped after 2 steps"),
        ({"ok": False, "fault": "Traceback\nout of memory: tried 2 GiB"}, "out of memory: tried 2 GiB"),
    ],
)
def test_the_verdict_on_a_run(change: dict[str, Any], said: str) -> None:
    assert verify_presets.verdict(GOOD | change) == said


def test_a_run_counts_as_done_until_something_changes(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text("{}")
    run = Run(name="a", arguments={"cutoff_len": 8, "deepspeed": str(config)})
    before = verify_presets.digest(run)
    assert verify_presets.digest(Run(name="a", arguments=dict(run.arguments))) == before
    assert verify_presets.digest(Run(name="a", arguments=run.arguments | {"cutoff_len": 9})) != before
    config.write_text('{"zero_optimization": {"stage": 3}}')
    assert verify_presets.digest(run) != before
    rows = [{"name": "a", "ok": False}, {"name": "b", "ok": True}, {"name": "a", "ok": True}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert verify_presets.earlier(tmp_path / "rows.jsonl") == {"a": rows[2], "b": rows[1]}


def test_results_that_were_cut_off_are_passed_over(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"name": "a", "ok": true}\n[]\n{"ok": true}\n{"name": "b", "o')
    assert verify_presets.earlier(out) == {"a": {"name": "a", "ok": True}}
    verify_presets.begin_line(out)
    verify_presets.begin_line(out)
    with out.open("a") as file:
        file.write('{"name": "b", "ok": true}\n')
    assert verify_presets.earlier(out).keys() == {"a", "b"} and "\n\n" not in out.read_text()
    verify_presets.begin_line(tmp_path / "new.jsonl")
    assert (tmp_path / "new.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cpu_smoke"], "error: none of these presets can run here"),
        (["80gb_lora", "2x24gb_lora"], "error: none of these presets can run here"),
        (["12gb_lora", "--out", "no/such/rows.jsonl"], "rows.jsonl cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_run_or_be_kept_ends_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(preset_runs, "card", lambda: CARD | {"count": 1, "total": 24 * 2**30})
    monkeypatch.setattr(preset_runs, "prepare", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["verify_presets.py", *words])
    with pytest.raises(SystemExit) as ended:
        verify_presets.main()
    assert said in str(ended.value)


def test_speed_leaves_the_first_step_out() -> None:
    given = {"cutoff_len": 100, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "stage": "dpo"}
    run = Run(name="a", arguments=given, cap_gib=11.0, num_gpus=2, row={"predicted_gib": 9.0})
    row = verify_presets.completed(run, GOOD | {"step_seconds": [9.0, 1.0, 2.0]}, CARD)
    assert row["tokens_per_step"] == 100 * 2 * 3 * 2 * 2
    assert row["tokens_per_second"] == 2 * row["tokens_per_step"] / 3


@pytest.mark.parametrize("name", compare_speed.MIXES)
def test_a_mix_has_the_stated_mean_and_is_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(compare_speed, "ROOT", tmp_path)
    folder, lengths = compare_speed.write_mix(name)
    mean, longest, _, count = compare_speed.MIXES[name]
    assert len(lengths) == count and max(lengths) < longest
    assert sum(lengths) / count == pytest.approx(mean, rel=0.01)
    first = (folder / "rows.json").read_bytes()
    rows = json.loads(first)
    assert [len(f"{row['instruction']}{row['output']}".split()) for row in rows] == lengths
    compare_speed.write_mix(name)
    assert (folder / "rows.json").read_bytes() == first


def test_every_way_of_a_comparison_differs_in_what_its_name_says() -> None:
    preset = presets.find("24gb_qlora")
    ways = compare_speed.arms(preset)
    assert ways["preset"] == preset.arguments
    micro = "cutoff_len", "per_device_train_batch_size"
    product = {name: given[micro[0]] * given[micro[1]] for name, given in ways.items()}
    assert product["shorter"] == product["preset"] and ways["shorter"]["cutoff_len"] == 2048
    assert all(given["quantization_bit"] == 4 for given in ways.values())
    assert product["example"] == 2048 and product["recipe"] == 2 * 1024


def test_a_speed_is_that_of_what_was_counted_after_the_first_step() -> None:
    run = Run(name="a", arguments={}, row={"preset": "p", "arm": "preset", "mix": "chat", "changed": ""})
    run.row["model"] = "Qwen/Qwen3-8B"
    counted = [[10, 1000, 1200], [30, 3000, 3200]]
    row = compare_speed.completed(
        run, {"ok": True, "step_seconds": [5.0, 2.0], "counted": counted, "peak_gib": 1.0}, CARD
    )
    assert (row["samples_per_second"], row["tokens_per_second"], row["padding"]) == (10, 1000, 0)
    slower = row | {"arm": "example", "samples_per_second": 2.5}
    assert " 4.0x" in compare_speed.table([row, slower])


def test_shapes_have_as_many_weights_as_their_names_say() -> None:
    for size in qwen3_shapes.DENSE:
        active, _ = qwen3_shapes.parameters(f"Qwen/Qwen3-{size}")
        said = float(size.rpartition("-A")[2].rstrip("B"))
        assert active / 1e9 == pytest.approx(said, rel=0.1), size


def test_what_a_run_dies_of_is_in_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (preset_runs, measure_runs):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    rows = []
    run = Run(name="a", arguments={"output_dir": str(tmp_path / "out")})
    left = preset_runs.run_all([run], jobs=2, card_gib=100, done=lambda _, row: rows.append(row), deadline=200)
    assert left == [] and [row["ok"] for row in rows] == [False]
    assert rows[0]["name"] == "a" and rows[0]["fault"]


def test_the_text_that_is_tuned_on_is_another_one() -> None:
    pairs = compare_loss.questions()
    assert len(pairs) > compare_loss.HELD_OUT + 1000
    assert len({answer for _, answer in pairs}) == len(pairs)
    reference = compare_loss.reference()
    assert len(reference) > 400_000
    assert sum(answer in reference for _, answer in pairs) < len(pairs) / 100
