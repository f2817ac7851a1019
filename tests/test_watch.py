"""The watch in real trainings on the CPU: what is logged and kept, and what is told where main memory runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "presets/cpu_smoke.yaml"
ENV = {"CUDA_VISIBLE_DEVICES": "", "LLAMAFACTORY_TEMPLATE": "off", "OMP_NUM_THREADS": "1"}
SECRET = "hf_abcdefghijklmnopqrstuvwxyz"
CGROUP = Path("/sys/fs/cgroup/memory")

# The process's address space ends a little above what it has when training begins.
LIMITED = """
import resource
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback
class Limit(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
run_exp(callbacks=[Limit()])
"""


def command(model: Path, folder: str, **changes: Any) -> list[str]:
    given = {"model_name_or_path": model, "output_dir": folder, "plot_loss": "false", "max_steps": 2} | changes
    return [str(PRESET), *(f"{key}={value}" for key, value in given.items())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, str]:
    """Two ranks that trained, evaluated and saved; the folder, and what was said."""
    folder = tmp_path_factory.mktemp("run")
    words = command(
        tiny_model, "out", max_steps=4, logging_steps=2, val_size=0.1, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=4, hf_hub_token=SECRET,
    )  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAFACTORY_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    env = inherited | ENV | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["llamafactory-cli", "train", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out", done.stderr


def test_memory_is_in_the_log_of_the_trainer_and_of_llamafactory(trained: tuple[Path, str]) -> None:
    out, _ = trained
    rows = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    assert len(logged) == 2 and all(0.1 < row["host_mem_gib"] <= row["host_mem_peak_gib"] for row in logged)
    assert all("host_mem_gib" not in row for row in rows if "loss" not in row)
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [row["host_mem_gib"] for row in history if "loss" in row] == [row["host_mem_gib"] for row in logged]


def test_preflight_json_keeps_prediction_measurement_versions_and_arguments(trained: tuple[Path, str]) -> None:
    out, said = trained
    text = (out / "preflight.json").read_text()
    kept = json.loads(text)
    assert SECRET not in text and kept["arguments"]["max_steps"] == 4
    assert kept["versions"]["torch"] and kept["prediction"]["components"]["weights"] > 0
    assert kept["measurement"]["num_ranks"] == 2 and [rank["rank"] for rank in kept["ranks"]] == [0, 1]
    assert kept["measurement"]["host_peak_bytes_of_all"] > kept["measurement"]["host_peak_bytes"] > 2**28
    for rank in kept["ranks"]:
        assert {"load", "forward_backward", "optimizer_step", "evaluate", "save"} <= rank["phases"].keys()
        assert rank["steps"] == 4 and rank["longest_batch"]["sequences"] == 4
    assert said.count("peak main memory: predicted ") == 1
    assert not (out / ".preflight").exists()


def test_watching_costs_less_than_half_a_percent(trained: tuple[Path, str]) -> None:
    out, _ = trained
    kept = json.loads((out / "preflight.json").read_text())
    runtime = json.loads((out / "train_results.json").read_text())["train_runtime"]
    assert 0 < kept["ranks"][0]["watch_seconds"] < 0.005 * runtime


def test_address_space_that_ends_is_explained_below_the_traceback(run: Any, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    words = command(tiny_model, "out", per_device_train_batch_size=32)
    done = run(["python", "limited.py", *words], cwd=tmp_path, env=ENV)
    assert done.returncode == 1
    _, _, answer = done.stderr.partition("Error code 12 (Cannot allocate memory)")
    flat = " ".join(answer.split())
    assert "ran out of main memory in the forward or backward pass of step 1" in flat
    assert "Asked for " in flat and "No checkpoint was completed yet" in flat
    assert json.loads((tmp_path / "out/preflight.json").read_text())["ranks"][0]["longest_batch"]["sequences"] == 32
    assert not (tmp_path / "out/.preflight").exists()


# The same for the second rank alone, from when it trains.
ONE_RANK_LIMITED = """
import os, resource, sys, threading, time
def patch():
    while not hasattr(sys.modules.get("transformers.trainer"), "Trainer"):
        time.sleep(0.01)
    trainer = sys.modules["transformers.trainer"].Trainer
    original = trainer.training_step
    def limited(*args, **kwargs):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        return original(*args, **kwargs)
    trainer.training_step = limited
if os.environ.get("RANK") == "1":
    threading.Thread(target=patch, daemon=True).start()
"""


def test_the_one_rank_that_ran_out_is_heard_below_torchrun_s_error(run: Any, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(ONE_RANK_LIMITED)
    env = ENV | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PYTHONPATH": str(tmp_path / "site")}
    words = command(tiny_model, "out", per_device_train_batch_size=32)
    done = run(["llamafactory-cli", "train", *words], cwd=tmp_path, env=env)
    assert done.returncode == 1
    _, _, last = done.stderr.rpartition("CalledProcessError")
    flat = " ".join(last.split())
    assert "rank 1 ran out of main memory in the forward or backward pass of step 1" in flat
    assert "rank 0" not in flat and "No checkpoint was completed yet" in flat
    assert not (tmp_path / "out/.preflight").exists()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup whose processes the kernel kills above a limit."""
    group = CGROUP / f"preflight_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2800 * 2**20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here ({error.strerror}): it takes root and version 1")
    yield group
    group.rmdir()


def test_a_rank_that_the_kernel_kills_is_spoken_for_by_the_parent_and_a_run_by_the_next(
    run: Any, tmp_path: Path, tiny_model: Path, small_cgroup: Path
) -> None:
    words = " ".join(command(tiny_model, "out", per_device_train_batch_size=64))
    inside = f"echo $$ > {small_cgroup}/cgroup.procs; exec llamafactory-cli train {words}"
    env = ENV | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    done = run(["bash", "-c", inside], cwd=tmp_path, env=env)
    assert done.returncode == 1
    flat = " ".join(done.stderr.split())
    assert "rank 0 ended without a word in the forward or backward pass of step 1. The kernel has killed" in flat
    assert "CalledProcessError" in done.stderr and flat.index("CalledProcessError") < flat.index(
        "ended without a word"
    )
    alone = run(["bash", "-c", inside.replace("plot_loss", "save_steps=9 plot_loss")], cwd=tmp_path, env=ENV)
    assert alone.returncode == -9 and "ended without a word" not in alone.stderr
    refused = command(tiny_model, "out", finetuning_type="full", quantization_bit=8)
    begun = run(["llamafactory-cli", "train", *refused], cwd=tmp_path, env=ENV)
    assert begun.returncode == 1
    assert " ".join(begun.stderr.split()).count("rank 0 ended without a word in the forward or backward pass") == 1
