"""Every preset passes LLaMA-Factory's own parser without us; the smoke preset trains through the real command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
REPORT = re.compile(r"^llamafactory-preflight( [\d.]+)?: (?!template: )", re.MULTILINE)
PRESETS = sorted(ROOT.glob("presets/*.yaml"))
# LLaMA-Factory's own parser reads a file; our finder is taken out of the process first, so this is what it does alone.
PLAIN_PARSER = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "llamafactory_preflight" not in type(finder).__module__]
from llamafactory.hparams import get_train_args, read_args
_, data, training, finetuning, _ = get_train_args(read_args())
assert "llamafactory_preflight.hooks" not in sys.modules
print("PARSED", data.dataset, data.dataset_dir, training.output_dir, finetuning.finetuning_type)
"""


def test_there_are_presets() -> None:
    assert {"24gb_lora.yaml", "cpu_smoke.yaml"} <= {preset.name for preset in PRESETS}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_plain_llamafactory_accepts_every_key(run: Any, tmp_path: Path, preset: Path) -> None:
    # transformers refuses bf16 on a machine without GPU unless it is told to use the CPU.
    done = run(["python", "-c", PLAIN_PARSER, preset, "use_cpu=true"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"PARSED \['identity'\] data saves/\S+ lora", done.stdout)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_presets_stay_relative_and_explain_themselves(preset: Path) -> None:
    text = preset.read_text(encoding="utf-8")
    assert "output_dir: saves/" in text
    assert "/home/" not in text and "\\" not in text
    for key in ("cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps"):
        assert re.search(rf"^{key}: \S+  # .+", text, re.MULTILINE), f"{key} has no comment on its effect"


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_the_smoke_preset_trains_outside_of_a_clone(run: Any, tmp_path: Path, tiny_model: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "saves").mkdir()
    (tmp_path / "saves/tiny-qwen3").symlink_to(tiny_model)
    done = run(["llamafactory-cli", "train", ROOT / "presets/cpu_smoke.yaml"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

    assert len(REPORT.findall(done.stderr)) == 1, "the report, and no warning beside it"
    assert re.search(r"^(FITS|TIGHT|UNKNOWN): ", done.stderr, re.MULTILINE)
    said = re.sub(r"\s", "", done.stderr)  # the report is wrapped
    assert re.sub(r"\s", "", str(ROOT / "presets/data")) in said, "what was resolved is not said"
    assert not REPORT.search(done.stdout)

    first_row = json.loads((ROOT / "presets/data/identity.json").read_text(encoding="utf-8"))[0]
    assert first_row["output"] in done.stdout
    saved = tmp_path / "saves/cpu_smoke"
    curve = losses(saved)
    assert len(curve) == 15
    assert sum(curve[-3:]) / 3 < sum(curve[:3]) / 3 - 0.5, curve
    assert (saved / "training_loss.png").stat().st_size > 1000
    adapter = load_file(saved / "adapter_model.safetensors")
    assert sum(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name) == 14  # 7 linears, 2 layers


@pytest.mark.parametrize("mode", ["block", "off"])
def test_inside_a_clone_the_clones_data_is_used(run: Any, tmp_path: Path, tiny_model: Path, mode: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"identity": {"file_name": "own.json"}}', encoding="utf-8")
    rows = [{"instruction": "Whose data?", "input": "", "output": f"The clone's, row {n}."} for n in range(4)]
    (tmp_path / "data/own.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "presets/cpu_smoke.yaml", tmp_path / "examples/smoke.yaml")
    command = ["llamafactory-cli", "train", "examples/smoke.yaml", f"model_name_or_path={tiny_model}", "max_steps=1"]
    done = run(command, cwd=tmp_path, env={"LLAMAFACTORY_PREFLIGHT": mode})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The clone's, row 0." in done.stdout
    assert bool(REPORT.search(done.stderr)) == (mode == "block")
    assert (tmp_path / "saves/cpu_smoke/adapter_model.safetensors").is_file()


def test_the_data_set_is_bilingual_and_varied() -> None:
    rows = json.loads((ROOT / "presets/data/identity.json").read_text(encoding="utf-8"))
    assert 90 <= len(rows) <= 110
    assert all(set(row) == {"instruction", "input", "output"} and row["instruction"] and row["output"] for row in rows)
    assert len({(row["instruction"], row["input"]) for row in rows}) == len(rows)
    chinese = [row for row in rows if re.search("[\u4e00-\u9fff]", row["instruction"])]
    assert 40 <= len(chinese) <= 60
    for placeholder in ("{{name}}", "{{author}}"):
        assert sum(placeholder in row["output"] for row in rows) >= 40
    assert not re.search(r"\{\{(?!name\}\}|author\}\})", json.dumps(rows))


@pytest.mark.parametrize("path", sorted(ROOT.glob("deepspeed_configs/*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_leave_nothing_to_the_version(path: Path) -> None:
    zero = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]
    assert {"stage", "overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size"} <= set(zero)
    for offload in (value for key, value in zero.items() if key.startswith("offload_")):
        assert set(offload) == {"device", "pin_memory"}
    if zero["stage"] == 3:
        live = {"stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"}
        assert live | {"stage3_gather_16bit_weights_on_model_save", "offload_param"} <= set(zero)
    assert not any(isinstance(value, float) for value in zero.values()), "element counts are integers"
