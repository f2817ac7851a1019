"""Each DeepSpeed file trains, saves and resumes through LLaMA-Factory: two processes on the CPU, the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(ROOT.glob("deepspeed_configs/*.json"))
# Without `use_cpu`, which lets Accelerate open the process group, so that zero.Init of DeepSpeed sees one process.
TWO_PROCESSES = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
SETTINGS = {
    "finetuning_type": "full",
    "per_device_train_batch_size": "1",
    "cutoff_len": "128",
    "max_samples": "16",
    "learning_rate": "1e-4",
    "max_steps": "4",
    "logging_steps": "1",
    "save_strategy": "steps",
    "save_steps": "2",
    "plot_loss": "false",
}


@pytest.fixture
def train(run: Any, tmp_path: Path, tiny_model: Path) -> Any:
    def train(config: Path, output: str, **more: str) -> dict[int, float]:
        """Trains into `output`; gives the loss of each step."""
        settings = SETTINGS | {"model_name_or_path": tiny_model, "deepspeed": config, "output_dir": output} | more
        words = [f"{key}={value}" for key, value in settings.items()]
        done = run(
            ["llamafactory-cli", "train", ROOT / "presets/cpu_smoke.yaml", *words], cwd=tmp_path, env=TWO_PROCESSES
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = map(json.loads, (tmp_path / output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines())
        return {row["current_steps"]: row["loss"] for row in rows if "loss" in row}

    return train


@pytest.mark.parametrize("config", FILES, ids=lambda path: path.stem)
def test_a_file_trains_saves_and_resumes(train: Any, tmp_path: Path, config: Path) -> None:
    from safetensors.torch import load_file

    whole = train(config, "whole")
    assert list(whole) == [1, 2, 3, 4] and whole[4] < whole[1]

    second_half = train(config, "resumed", resume_from_checkpoint="whole/checkpoint-2")
    assert list(second_half) == [3, 4]
    assert second_half == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-5)

    whole_model, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    halfway = load_file(tmp_path / "whole/checkpoint-2/model.safetensors")
    assert set(whole_model) == set(resumed) == set(halfway)
    for name, weight in whole_model.items():
        assert weight.numel() and weight.allclose(resumed[name], atol=1e-6), name
    assert any(not weight.allclose(halfway[name], atol=1e-6) for name, weight in whole_model.items())
