"""Every way in which LLaMA-Factory starts a training goes through the plugin, and through it once."""

from __future__ import annotations

import io
import os
import re
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import handoff


ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "presets/cpu_smoke.yaml"
REPORT = re.compile(r"^.*llamafactory-preflight \d[\d.]*: ", re.MULTILINE)
LINE = re.compile(r"^llamafactory-preflight: (?!template: |peak ).*", re.MULTILINE)  # repairs are tested elsewhere
TOO_SMALL = {"LLAMAFACTORY_PREFLIGHT_GPU": "0.5GiB"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}

# A program of the user's that trains with a mapping; what it was given stands in the first line.
PROGRAM = """
import sys
from omegaconf import OmegaConf
from llamafactory.train.tuner import run_exp
if __name__ == "__main__":
    args = OmegaConf.to_container(OmegaConf.load(ARGUMENTS["preset"])) | ARGUMENTS["changes"]
    run_exp(args)
    print("PROGRAM GOES ON")
"""


@pytest.fixture
def overrides(tiny_model: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(tiny_model), "max_steps": 1, "output_dir": "saved", "plot_loss": False}


@pytest.fixture
def arguments(overrides: dict[str, Any]) -> list[str]:
    return [str(PRESET), *(f"{key}={value}" for key, value in overrides.items())]


@pytest.fixture
def launcher() -> str:
    spec = util.find_spec("llamafactory")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).with_name("launcher.py"))


def assert_refused(done: Any, folder: Path) -> None:
    assert done.returncode == 1, done.stderr[-3000:]
    assert len(REPORT.findall(done.stderr)) == 1
    assert "WILL NOT FIT" in done.stderr
    assert not (folder / "saved").exists()


def assert_trained(done: Any, folder: Path) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "saved/adapter_model.safetensors").is_file()


def test_two_ranks_train_after_one_report(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    env = ON_CPU | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    done = run(["llamafactory-cli", "train", *arguments], cwd=tmp_path, env=env)
    assert_trained(done, tmp_path)
    assert "world size: 2" in done.stdout + done.stderr
    assert (len(REPORT.findall(done.stderr)), LINE.findall(done.stderr)) == (1, [])


@pytest.mark.parametrize("torchrun", ["0", "1"])
def test_a_refusal_comes_before_torchrun(run: Any, tmp_path: Path, arguments: list[str], torchrun: str) -> None:
    env = TOO_SMALL | {"FORCE_TORCHRUN": torchrun, "NPROC_PER_NODE": "2"}
    done = run(["llamafactory-cli", "train", *arguments], cwd=tmp_path, env=env)
    assert_refused(done, tmp_path)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr


def test_the_launcher_as_a_module_is_refused(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    done = run(["python", "-m", "llamafactory.launcher", *arguments], cwd=tmp_path, env=TOO_SMALL)
    assert_refused(done, tmp_path)
    assert "Traceback" not in done.stderr


def test_of_ranks_without_our_parent_one_reports(
    run: Any, tmp_path: Path, arguments: list[str], launcher: str
) -> None:
    command = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", launcher, *arguments]
    assert_refused(run(command, cwd=tmp_path, env=TOO_SMALL | ON_CPU), tmp_path)


def test_a_command_line_of_flags_is_checked_once(run: Any, tmp_path: Path, overrides: dict[str, Any]) -> None:
    flags = {"stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "identity", "template": "qwen3"}
    flags |= overrides | {"dataset_dir": ROOT / "presets/data", "cutoff_len": 64, "report_to": "none"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    done = run(["llamafactory-cli", "train", *words], cwd=tmp_path, env=ON_CPU)
    assert_trained(done, tmp_path)
    assert (len(REPORT.findall(done.stderr)), LINE.findall(done.stderr)) == (1, [])


def write_program(folder: Path, overrides: dict[str, Any], first_lines: str = "") -> Path:
    program = folder / "program.py"
    given = {"preset": str(PRESET), "changes": overrides}
    program.write_text(f"ARGUMENTS = {given!r}\n{first_lines}\n{PROGRAM}", encoding="utf-8")
    return program


def test_a_program_that_calls_run_exp_is_refused(run: Any, tmp_path: Path, overrides: dict[str, Any]) -> None:
    done = run(["python", write_program(tmp_path, overrides)], cwd=tmp_path, env=TOO_SMALL)
    assert_refused(done, tmp_path)
    assert "PROGRAM GOES ON" not in done.stdout and "Traceback" not in done.stderr


def test_a_check_that_breaks_is_one_line_and_training_goes_on(
    run: Any, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    program = write_program(tmp_path, overrides, "import sys\nsys.modules['llamafactory_preflight.preflight'] = None")
    done = run(["python", program], cwd=tmp_path, env=TOO_SMALL | ON_CPU)
    assert_trained(done, tmp_path)
    assert "PROGRAM GOES ON" in done.stdout
    assert len(LINE.findall(done.stderr)) == 1 and not REPORT.search(done.stderr)


def test_the_boards_child_is_refused(run: Any, tmp_path: Path, overrides: dict[str, Any]) -> None:
    code = f"""
import sys
from omegaconf import OmegaConf
from subprocess import PIPE, Popen
from llamafactory.webui.common import save_cmd
args = OmegaConf.to_container(OmegaConf.load({str(PRESET)!r})) | {overrides!r}
args["output_dir"] = {str(tmp_path / "saved")!r}
child = Popen(["llamafactory-cli", "train", save_cmd(args)], stderr=PIPE, text=True)
print("CHILD", child.communicate()[1], child.returncode)
"""
    done = run(["python", "-c", code], cwd=tmp_path, env=TOO_SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(REPORT.findall(done.stdout)) == 1 and "WILL NOT FIT" in done.stdout
    assert done.stdout.split()[-1] == "1"
    assert (tmp_path / "saved/training_args.yaml").is_file() and len(list((tmp_path / "saved").iterdir())) == 1


def test_a_file_that_does_not_exist_is_one_line(run: Any, tmp_path: Path) -> None:
    done = run(["llamafactory-cli", "train", "missing.yaml"], cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("llamafactory-preflight: missing.yaml does not exist.")


def test_a_switch_that_does_not_exist_is_said_once(run: Any, tmp_path: Path) -> None:
    env = {"LLAMAFACTORY_PREFLIGHT": "of"}
    done = run(["llamafactory-cli", "train", "missing.yaml"], cwd=tmp_path, env=env)
    switch, missing = LINE.findall(done.stderr)
    assert "LLAMAFACTORY_PREFLIGHT=of" in switch and "missing.yaml does not exist" in missing


def test_the_second_generation_is_said_to_be_unknown(run: Any, tmp_path: Path) -> None:
    done = run(["llamafactory-cli", "train", "missing.yaml"], cwd=tmp_path, env={"USE_V1": "1"})
    (line,) = LINE.findall(done.stderr)
    assert "USE_V1=1" in line


@pytest.mark.skipif(util.find_spec("ray") is None, reason="Ray is not installed")
def test_of_ray_workers_one_reports(run: Any, tmp_path: Path, overrides: dict[str, Any]) -> None:
    program = tmp_path / "program.py"
    # LLaMA-Factory asks for 10 CPUs a worker, so its worker class is started here without its scheduler.
    program.write_text(
        f"""
import os
import ray
from omegaconf import OmegaConf
from llamafactory.train import tuner
class CpuWorker(tuner.Worker):
    def __init__(self):
        os.environ["LOCAL_RANK"] = "0"
if __name__ == "__main__":
    args = OmegaConf.to_container(OmegaConf.load({str(PRESET)!r})) | {overrides!r}
    args["output_dir"] = {str(tmp_path / "saved")!r}
    ray.init(num_cpus=2, include_dashboard=False)
    place = {{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}}
    options = [{{"env_vars": place | {{"RANK": str(rank)}}}} for rank in range(2)]
    workers = [ray.remote(CpuWorker).options(num_cpus=1, runtime_env=env).remote() for env in options]
    ray.get([worker._training_function.remote({{"args": args, "callbacks": []}}) for worker in workers])
""",
        encoding="utf-8",
    )
    env = ON_CPU | {"USE_RAY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = run(["python", program], cwd=tmp_path, env=env)
    assert_trained(done, tmp_path)
    assert len(REPORT.findall(done.stderr)) == 1


def test_other_arguments_than_the_parents_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert not handoff.is_checked({"cutoff_len": 8})
    handoff.mark_checked({"cutoff_len": 8, "stage": "sft"}, config_file="a.yaml")
    assert handoff.is_checked({"stage": "sft", "cutoff_len": 8})
    assert not handoff.is_checked({"stage": "sft", "cutoff_len": 9})
    assert handoff.config_file() == str(Path("a.yaml").absolute())


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "RANK": "2"}, True),  # another machine, another GPU
        ({"LOCAL_RANK": "0", "RANK": "1"}, False),
    ],
)
def test_one_process_of_a_machine_speaks(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], speaks: bool
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    assert handoff.speaks() is speaks


def test_standard_error_that_takes_nothing_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = io.TextIOWrapper(full, write_through=True)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(OSError, match="No space left"):
            print("something", file=sys.stderr)
        handoff.say("something")
    with pytest.raises(ValueError, match="closed file"):
        print("something", file=sys.stderr)
    handoff.say("something")


def test_a_warning_is_not_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", {})
    for message in ("one", "two", "one", "two"):
        handoff.warn_once(message)
    assert capsys.readouterr().err.splitlines() == ["llamafactory-preflight: one", "llamafactory-preflight: two"]
