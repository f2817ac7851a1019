"""Every preset passes LLaMA-Factory's own parser without us; the smoke preset trains through the real command line."""

from __future__ import annotations

import json
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import presets as packed
from llamafactory_preflight.parallel.zero import ZeroPlan


ROOT = Path(__file__).resolve().parents[1]
REPORT = re.compile(r"^llamafactory-preflight( [\d.]+)?: (?!template: |peak )", re.MULTILINE)
PRESETS = sorted(ROOT.glob("presets/*.yaml"))
DATA_SETS = ("identity", "dpo_en_demo")
# LLaMA-Factory's own parser reads the files; our finder is taken out of the process first, so this is what it does
# alone. Without a GPU there is no bf16 but on the CPU, and DeepSpeed's file is read only where DeepSpeed is installed.
PLAIN_PARSER = """
import importlib.util, json, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "llamafactory_preflight" not in type(finder).__module__]
from llamafactory.hparams import get_train_args, read_args
RANKS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
for file in sys.argv[2:]:
    text = open(file, encoding="utf-8").read()
    here = ["use_cpu=true"] + ["pure_bf16=false"] * ("pure_bf16:" in text)
    if "deepspeed:" in text:
        os.environ.update(RANKS)
        here += ["deepspeed=null"] * (importlib.util.find_spec("deepspeed") is None)
    sys.argv = ["llamafactory-cli", file, *here]
    _, data, training, finetuning, _ = get_train_args(read_args())
    for name in RANKS:
        os.environ.pop(name, None)
    row = [file, data.dataset, data.dataset_dir, training.output_dir, finetuning.finetuning_type]
    print("PARSED", json.dumps(row))
assert "llamafactory_preflight.hooks" not in sys.modules
"""


def accepted(presets: list[Path]) -> list[Path]:
    """Those that the installed version takes: 0.9.4 refuses neat packing with the transformers that it allows."""
    if not metadata.version("llamafactory").startswith("0.9.4"):
        return presets
    return [preset for preset in presets if "neat_packing: true" not in preset.read_text(encoding="utf-8")]


def test_there_are_presets() -> None:
    assert {"24gb_lora.yaml", "cpu_smoke.yaml"} <= {preset.name for preset in PRESETS}


@pytest.mark.parametrize("place", ["the repository", "a clone"])
def test_plain_llamafactory_accepts_every_preset(run: Any, tmp_path: Path, place: str) -> None:
    chosen = accepted(PRESETS)
    folder, files = ROOT, [f"presets/{preset.name}" for preset in chosen]
    if place == "a clone":
        folder, files = tmp_path, [preset.name for preset in chosen]
        (tmp_path / "data").mkdir()
        names = {name: {"file_name": f"{name}.json"} for name in DATA_SETS}
        (tmp_path / "data/dataset_info.json").write_text(json.dumps(names), encoding="utf-8")
        for preset in chosen:
            packed.copy(preset.stem, tmp_path, force=False)
    done = run(["python", "-c", PLAIN_PARSER, "29811", *files], cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        json.loads(line.removeprefix("PARSED ")) for line in done.stdout.splitlines() if line.startswith("PARSED ")
    ]
    assert [row[0] for row in rows] == files
    for _, dataset, dataset_dir, output_dir, method in rows:
        assert dataset in ([name] for name in DATA_SETS)
        assert dataset_dir == "data" and output_dir.startswith("saves/") and method in ("lora", "full")


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
    given = json.loads(path.read_text(encoding="utf-8"))
    zero = given["zero_optimization"]
    assert {"stage", "overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size"} <= set(zero)
    for offload in (value for key, value in zero.items() if key.startswith("offload_")):
        assert set(offload) == {"device", "pin_memory"}
    assert zero["overlap_comm"] is False  # it takes more than four times the buckets
    assert given["bf16"]["check_grad_overflow"] is False  # 0.17.2 to 0.19.0 have it so, 0.16 and 0.19.8 do not
    if zero["stage"] == 3:
        live = {"stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"}
        assert live | {"stage3_gather_16bit_weights_on_model_save", "offload_param"} <= set(zero)
    assert not any(isinstance(value, float) for value in zero.values()), "element counts are integers"
    plan = ZeroPlan.from_config(given, hidden_size=4096)
    assert plan.offload_optimizer == ("cpu" if "offload" in path.stem else "none")
    assert plan.pin_memory == ("offload" in path.stem and "unpinned" not in path.stem)


def test_every_deepspeed_file_is_used_by_a_preset() -> None:
    used = {preset.arguments.get("deepspeed") for preset in packed.available()} - {None}
    assert used == {str(file.relative_to(ROOT)) for file in ROOT.glob("deepspeed_configs/*.json")}


def test_the_preference_data_is_bilingual_and_prefers_something() -> None:
    rows = json.loads((ROOT / "presets/data/dpo_en_demo.json").read_text(encoding="utf-8"))
    assert 40 <= len(rows) <= 80
    asked = [row["conversations"][0]["value"] for row in rows]
    assert len(set(asked)) == len(rows)
    assert sum(bool(re.search("[\u4e00-\u9fff]", text)) for text in asked) == len(rows) // 2
    assert all(row["chosen"]["value"] != row["rejected"]["value"] for row in rows)
