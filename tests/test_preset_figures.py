"""Headers of the presets, the README's table and the record say the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from llamafactory_preflight import preflight, presets
from llamafactory_preflight.presets import Preset


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import qwen3_shapes  # noqa: E402
import verify_presets  # noqa: E402
import write_figures as figures  # noqa: E402


TIERED = [preset for preset in presets.available() if preset.tier_gb]
RECORD = json.loads((ROOT / "presets/measured.json").read_text(encoding="utf-8"))


def header(preset: Preset) -> list[str]:
    return preset.file.read_text(encoding="utf-8").split("\n\n")[0].splitlines()


@pytest.mark.parametrize("preset", TIERED, ids=lambda preset: preset.name)
def test_a_header_says_what_the_preset_and_the_record_say(preset: Preset) -> None:
    what, tokens, measured, command, change, *notes = header(preset)
    model = preset.arguments["model_name_or_path"].rpartition("/")[2]
    assert what.startswith(f"# {model}, ") and f"{preset.tier_gb} GB card" in what
    step = figures.tokens_per_step(preset.arguments, preset.num_gpus)
    assert tokens == f"# Tokens: a sample holds at most {preset.arguments['cutoff_len']:,}, a step {step:,}."
    assert measured == figures.measured_line(preset.name, RECORD, preset.arguments)
    torchrun = "FORCE_TORCHRUN=1 " if "deepspeed" in preset.arguments and preset.num_gpus == 1 else ""
    assert command == f"# Run: {torchrun}llamafactory-cli train presets/{preset.name}.yaml"
    assert change.startswith("# Change first: ")
    wanted = {
        "liger-kernel": preset.arguments.get("enable_liger_kernel"),
        "bitsandbytes": preset.method == "qlora" or "8bit" in preset.arguments.get("optim", ""),
        "deepspeed": "deepspeed" in preset.arguments,
    }
    needs = next(note for note in notes if note.startswith("# Needs LLaMA-Factory "))
    assert all((package in needs) == bool(is_wanted) for package, is_wanted in wanted.items())
    assert ("0.9.5" in needs) == bool(preset.arguments.get("neat_packing"))


@pytest.mark.parametrize("preset", TIERED, ids=lambda preset: preset.name)
def test_a_preset_is_predicted_to_fill_the_smallest_card_of_its_tier(preset: Preset, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = qwen3_shapes.config(preset.arguments["model_name_or_path"])
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    cap = f"{presets.USABLE_GIB[preset.tier_gb]}GiB"
    overrides = [f"model_name_or_path={model}"]
    result = preflight.check(preset.file, overrides=overrides, free=cap, gpus=preset.num_gpus)
    if result.estimate is None:
        assert "deepspeed" in preset.arguments
        return
    assert result.verdict.word in ("fits", "tight")
    used = result.estimate.peak_allocated_bytes / preset.usable_bytes
    assert used < 0.975
    assert used > 0.8 or any("leaves" in line for line in header(preset))


def test_packs_have_a_length_that_llamafactory_can_pack_to() -> None:
    packed = [preset for preset in TIERED if preset.arguments.get("neat_packing")]
    assert packed
    # 0.9.5 pads ids to a multiple of 8, and the positions not at all.
    assert all(preset.arguments["cutoff_len"] % 8 == 0 for preset in packed)


def test_the_readme_shows_the_record() -> None:
    begin, end = figures.MARKS
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip()
    assert shown == figures.table(RECORD)


def test_the_record_holds_presets_within_their_memory_and_their_prediction() -> None:
    assert set(RECORD) <= {preset.name for preset in TIERED}
    for preset in TIERED:
        row = RECORD.get(preset.name)
        if row is not None:
            assert row["cap_gib"] == round(preset.usable_bytes / 2**30, 2)
            assert row["peak_gib"] < row["cap_gib"]
            assert figures.is_of(row, preset.arguments), "measured with other settings"
            if row["predicted_gib"] is not None:
                assert abs(row["predicted_gib"] / row["peak_gib"] - 1) < 0.02
            unused = row["peak_gib"] < 0.8 * row["cap_gib"]
            assert unused <= any("leaves" in line for line in header(preset)), "the header says why memory is left"


@pytest.mark.parametrize("name", RECORD)
def test_what_is_predicted_today_is_what_was_measured(name: str) -> None:
    preset, row = presets.find(name), RECORD[name]
    given = dict(preset.arguments) | {"gradient_accumulation_steps": row["accumulation"]}
    if "deepspeed" in given:
        given["deepspeed"] = str(ROOT / given["deepspeed"])
    hopper = {"name": row["gpu"], "total": 150 * 10**9, "capability": [9, 0]}
    estimate = verify_presets.estimated(given, preset, hopper)
    assert estimate is not None
    assert estimate.peak_allocated_bytes / 2**30 == pytest.approx(row["peak_gib"], rel=0.001)
    if "offload" in given.get("deepspeed", ""):  # of the others the record holds what is left between steps
        assert estimate.host_training_bytes / 2**30 == pytest.approx(row["host_gib"], rel=0.02)


def test_results_become_figures_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "presets").mkdir()
    preset = tmp_path / "presets/24gb_lora.yaml"
    preset.write_bytes((ROOT / "presets/24gb_lora.yaml").read_bytes())
    (tmp_path / "README.md").write_text("\n".join([*figures.MARKS, *figures.SPEED_MARKS]), encoding="utf-8")
    good = dict.fromkeys(figures.KEPT, 1) | {"name": "24gb_lora", "ok": True, "gpu": "card", "one_gpu": False}
    good |= {"peak_gib": 20.5, "cap_gib": 21.5, "tokens_per_second": 12345, "tokens_per_step": 16384}
    good["accumulation"] = 2
    rows = [good | {"peak_gib": 3.0}, good, good | {"name": "24gb_full", "ok": False}]
    rows.append(good | {"peak_gib": 4.0, "tokens_per_step": 4096})  # another batch than the preset's
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, path in {
        "ROOT": tmp_path,
        "RECORD": tmp_path / "measured.json",
        "SPEED": tmp_path / "speed.json",
        "README": tmp_path / "README.md",
    }.items():
        monkeypatch.setattr(figures, name, path)
    speed = {"ok": True, "mix": "short", "preset": "24gb_lora", "changed": "", "peak_gib": 20.5, "mfu": 0.25}
    speed |= {"tokens_per_second": 1.0, "step_seconds": [9.0, 1.0, 1.0]}
    arms = [
        speed | {"arm": arm, "samples_per_second": number}
        for arm, number in {"preset": 30.0, "recipe": 4.0, "example": 1.5}.items()
    ]
    arms.append(speed | {"arm": "example", "ok": False, "samples_per_second": 2.0})
    (tmp_path / "speed.jsonl").write_text("\n".join(map(json.dumps, arms)), encoding="utf-8")
    arguments = [str(tmp_path / "rows.jsonl"), "--speed", str(tmp_path / "speed.jsonl")]
    monkeypatch.setattr("sys.argv", ["write_figures.py", *arguments])
    figures.main()
    assert json.loads((tmp_path / "measured.json").read_text(encoding="utf-8")).keys() == {"24gb_lora"}
    line = "# Measured: 20.50 GiB of the 21.5 that the smallest such card offers; 12,345 tokens a second (card under"
    assert f"{line} that cap)." in preset.read_text(encoding="utf-8").splitlines()
    assert re.search(r"`presets/24gb_lora.yaml`.*20\.50 of 21\.5.*12,345", (tmp_path / "README.md").read_text("utf-8"))
    assert "| short | `24gb_lora` | 30.0 | 25% | 20.0x | 7.5x |" in (tmp_path / "README.md").read_text("utf-8")


def test_the_readme_has_the_speeds_of_the_record() -> None:
    record = json.loads((ROOT / "presets/speed.json").read_text(encoding="utf-8"))
    table = (ROOT / "README.md").read_text("utf-8").split(figures.SPEED_MARKS[0])[1].split(figures.SPEED_MARKS[1])[0]
    assert table.strip() == figures.speed_table(record)
    assert {row["preset"] for row in record} <= {preset.name for preset in TIERED}
