"""The shell scripts say in one line what is wrong. Real processes; only the machine's state is made up."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.run import RunDescription


ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("quickstart.sh", "test.sh")
UNREACHABLE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "1",
}


def program(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def stand_in_environment(folder: Path, body: str) -> Path:
    """A finished virtual environment, as far as the scripts look, whose Python runs `body`."""
    program(folder / "bin", "pip", "")
    return program(folder / "bin", "python", body)


def path_with_df(tmp_path: Path, *, free_kib: int) -> str:
    report = f"Filesystem 1024-blocks Used Available Capacity Mounted on\\ndisk 1 1 {free_kib} 1% /\\n"
    program(tmp_path / "bin", "df", f"printf '{report.replace('%', '%%')}'")
    return os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])


def start(run: Any, script: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    venv = env.pop("LLAMAFACTORY_PREFLIGHT_VENV", str(tmp_path / "venv"))
    return run(["bash", ROOT / "scripts" / script], env={"LLAMAFACTORY_PREFLIGHT_VENV": venv, **env}, cwd=tmp_path)


def only_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.mark.parametrize("script", SCRIPTS)
def test_python_too_old(run: Any, tmp_path: Path, script: str) -> None:
    # An interpreter of 2019, as far as the script can tell: it knows its version and that the comparison fails.
    old = program(tmp_path / "bin", "python3.8", '[ "$1" = -V ] && echo "Python 3.8.0"; exit 1')
    error = only_error(start(run, script, tmp_path, PYTHON=str(old)))
    assert "Python too old" in error and "Python 3.8.0" in error and "3.11" in error
    assert not (tmp_path / "venv").exists()


def test_no_python(run: Any, tmp_path: Path) -> None:
    assert "no nosuchpython here" in only_error(start(run, "quickstart.sh", tmp_path, PYTHON="nosuchpython"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_disk_full_before_the_installation(run: Any, tmp_path: Path, script: str) -> None:
    path = path_with_df(tmp_path, free_kib=900_000)
    error = only_error(start(run, script, tmp_path, PYTHON=sys.executable, PATH=path))
    assert "disk full" in error and "0 GB free" in error


def test_disk_full_during_the_installation(run: Any, tmp_path: Path) -> None:
    pip = 'echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"; exit 1'
    stand_in_environment(tmp_path / "venv", pip)
    assert "disk full" in only_error(start(run, "quickstart.sh", tmp_path))


def test_another_failure_of_pip(run: Any, tmp_path: Path) -> None:
    stand_in_environment(tmp_path / "venv", 'echo "ERROR: No matching distribution found for x"; exit 1')
    assert "pip failed: No matching distribution found for x" in only_error(start(run, "test.sh", tmp_path))
    stand_in_environment(tmp_path / "venv", "exit 3")
    assert "pip failed: no reason given" in only_error(start(run, "test.sh", tmp_path))


def test_no_network(run: Any, tmp_path: Path) -> None:
    path = path_with_df(tmp_path, free_kib=90_000_000)
    done = start(run, "quickstart.sh", tmp_path, PYTHON=sys.executable, PATH=path, **UNREACHABLE)
    error = only_error(done)
    assert "no network" in error
    assert "127.0.0.1" in Path(error.split("log: ")[1].rstrip(")")).read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_made(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    venv = str(tmp_path / "file/venv")
    done = start(run, "quickstart.sh", tmp_path, PYTHON=sys.executable, LLAMAFACTORY_PREFLIGHT_VENV=venv)
    assert "cannot write" in only_error(done)


def test_what_is_installed_is_not_installed_again(run: Any, tmp_path: Path) -> None:
    # A program in place of the environment's Python writes down how it was called; building the model fails.
    log = tmp_path / "calls"
    stand_in_environment(tmp_path / "venv", f'echo "$@" >> "{log}"; case "$*" in *build_tiny*) exit 1;; esac')

    def installed(script: Path) -> list[str]:
        log.write_text("", encoding="utf-8")
        done = run(["bash", script], env={"LLAMAFACTORY_PREFLIGHT_VENV": str(tmp_path / "venv")}, cwd=tmp_path)
        assert done.returncode == (1 if script.name == "quickstart.sh" else 0), done.stderr
        calls = log.read_text(encoding="utf-8").splitlines()
        return [call.split("--disable-pip-version-check ")[1] for call in calls if call.startswith("-m pip install")]

    other = tmp_path / "other tree"
    shutil.copytree(ROOT / "scripts", other / "scripts")
    shutil.copytree(ROOT / "plugin", other / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", other)

    framework, project = installed(ROOT / "scripts/quickstart.sh")
    assert "llamafactory==0.9.5" in framework and project == f"-e {ROOT}"
    assert installed(ROOT / "scripts/quickstart.sh") == []
    assert installed(ROOT / "scripts/test.sh") == [f"-e {ROOT}[test]"]
    assert installed(ROOT / "scripts/test.sh") == []
    assert installed(other / "scripts/test.sh") == [f"-e {other}"]
    assert installed(ROOT / "scripts/test.sh") == [f"-e {ROOT}"], "the tests would run another tree's code"


@pytest.mark.parametrize("path", [*ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_shell_syntax(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""


@pytest.mark.usefixtures("scripts")
def test_a_row_to_share_holds_no_path_and_no_name() -> None:
    import measure_peak

    given = {
        "model_name_or_path": "/home/me/secret-model", "output_dir": "/home/me/out", "hf_hub_token": "hf_x",
        "lora_rank": 4, "swanlab_api_key": "k",
        "default_system": "You are Bob.", "swanlab_project": "mine",
        "dataset": "mine", "stage": "sft", "cutoff_len": 128, "run_name": "me",
    }  # fmt: skip
    config = {"model_type": "qwen3", "hidden_size": 64, "_name_or_path": "/home/me/secret-model"}
    case = measure_peak.case_of(given, 3)
    row = {"ok": True, "peak_allocated_gib": 1.5, "args": {"output_dir": "/tmp/x"}, "error": "/home/me"}
    shared = measure_peak.row_to_share(case, config, row, card="A100", predicted_gib=1.5)
    odd = {"args": case["args"] | {"additional_target": "/home/me/x", "rope_scaling": "my words"}}
    odd["args"] |= {"add_special_tokens": "<bob>", "offload_folder": "bob", "accelerator_config": {"a": "bob"}}
    odd["args"] |= {"label_names": ["bob"], "vllm_config": "bob.json", "length_column_name": "bob"}
    assert measure_peak.row_to_share(odd, config, row)["args"] == case["args"]
    for target in (["q_proj", "v_proj"], "q_proj,v_proj"):
        kept = measure_peak.row_to_share({"args": {"lora_target": target}}, config, row)["args"]
        assert kept == {"lora_target": target}
    assert case["args"] == measure_peak.UNSET | {"lora_rank": 4, "stage": "sft", "cutoff_len": 128, "max_steps": 3}
    assert measure_peak.case_of({"bf16": True}, 3)["args"]["bf16"]
    assert shared == {
        "shape": {"model_type": "qwen3", "hidden_size": 64}, "args": case["args"], "ok": True,
        "peak_allocated_gib": 1.5, "card": "A100", "predicted_gib": 1.5,
    }  # fmt: skip


@pytest.mark.usefixtures("scripts")
def test_what_a_yaml_leaves_out_is_measured_as_llamafactory_has_it() -> None:
    import measure_peak
    import measure_runs

    names = {field.name: field.default for field in dataclasses.fields(RunDescription)}
    measured = measure_runs.DEFAULTS | measure_peak.case_of({}, 3)["args"]
    memory = measured.keys() & names.keys() - {"lora_target", "do_train", "template", "save_strategy", "max_steps"}
    memory -= {"preprocessing_num_workers", "report_to"}
    assert {name: measured[name] for name in memory} == {name: names[name] for name in memory}
    assert measured["lora_target"] == ",".join(names["lora_target"])


def test_measuring_needs_a_card_and_says_so(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: x\n")
    done = run(["python", ROOT / "scripts/measure_peak.py", "a.yaml"], cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and done.stderr.startswith("error: There is no GPU here")
    done = run(["python", ROOT / "scripts/provoke_oom.py", "out"], cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "no CUDA card" in done.stderr


@pytest.mark.usefixtures("scripts")
def test_a_page_that_loads_more_than_a_tenth_slower_is_told_by_the_exit_status() -> None:
    import bench_board

    slower = bench_board.ratio([2.0, 1.0, 90.0], [0.1, 2.2, 2.4])
    assert slower == pytest.approx(1.1)
    assert [bench_board.status(value) for value in (0.9, 1.0, 1.0999, 1.1001, 2.0)] == [0, 0, 0, 1, 1]


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("cost", [0.0, 0.004, 0.02])
def test_what_the_watch_costs_is_found_on_a_machine_that_slows_down(cost: float) -> None:
    import bench_watch

    def taken(step: int) -> float:
        machine = 0.3 * (1 + step / 500 + 0.05 * (step % 97 == 0)) + 0.2 * (step % bench_watch.LOGS == 0)
        return machine * (1 + cost * bench_watch.is_watched(step))

    result = bench_watch.compared([taken(step) for step in range(1, 261)], watch_seconds=0.0)
    assert result["difference"] == pytest.approx(cost, abs=0.003)
    assert result["other"]["low"] <= result["other"]["median"] <= result["other"]["high"]
    assert result["other"]["count"] >= 30 and result["logged"]["count"] >= 10
