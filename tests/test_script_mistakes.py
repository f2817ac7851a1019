"""A script ends at a wrong word with one message and exit code 2, and loses nothing that a user owns."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import build_tiny_model  # noqa: E402
import command_line  # noqa: E402
import compare_oracle  # noqa: E402
import write_figures  # noqa: E402


CASE = {"id": "a", "model": "m", "args": {}}
PLAN = {"models": {"m": {}}, "cases": [CASE]}
MISTAKES: list[tuple[str, str]] = [
    ("accuracy.py none", "none is not one"),
    ("accuracy.py broken", "measured.jsonl, line 2 is not JSON"),
    ("accuracy.py --accept --predict broken", "not both"),
    ("bench_estimate.py --repeat 0", "'0' is not a whole number of 1 or more"),
    ("bench_startup.py --starts 0", "'0' is not a whole number of 1 or more"),
    ("bench_board.py --rounds 0", "'0' is not a whole number of 1 or more"),
    ("bench_template.py --pairs -1", "'-1' is not a whole number of 1 or more"),
    ("bench_watch.py output_dir=mine", "`output_dir` is set by the comparison itself"),
    ("bench_watch.py cutof_len=5", "`cutof_len` is not an argument of LLaMA-Factory"),
    ("bench_watch.py cutoff_len", "as KEY=VALUE, not cutoff_len"),
    ("bench_watch.py cutoff_len=[", "a value is not YAML"),
    ("compare_loss.py --cpu --arm nope", "there is no arm 'nope' here"),
    ("compare_loss.py", "there is no CUDA GPU here that torch can use"),
    ("compare_loss.py --cpu --samples 0", "'0' is not a whole number of 1 or more"),
    ("compare_oracle.py --only 310", "--only takes 0 to 309"),
    ("compare_speed.py --jobs 0 24gb_lora", "'0' is not a whole number of 1 or more"),
    ("compare_speed.py nope", "nope"),
    ("compare_speed.py 2x24gb_full_zero2", "2x24gb_full_zero2 is not for one GPU"),
    ("measure_peak.py none.yaml", "none.yaml does not exist"),
    ("measure_ranks.py", "measure_runs.py starts it"),
    ("measure_runs.py none.json out.jsonl", "none.json does not exist"),
    ("measure_runs.py notes.txt out.jsonl", "notes.txt is not JSON"),
    ("measure_runs.py list.json out.jsonl", "list.json holds no JSON object"),
    ("measure_runs.py plan.json notes.txt", "notes.txt, line 1 is not JSON"),
    ("measure_runs.py plan.json plan.json", "plan.json, line 1 is no row of results"),
    ("measure_runs.py plan.json none/out.jsonl", "none, where out.jsonl should be written, is not a folder"),
    ("measure_runs.py plan.json mine", "mine cannot be read"),
    ("measure_runs.py leads_out.json out.jsonl", "case 1 is called '../../mine'"),
    ("measure_runs.py absolute.json out.jsonl", "case 1 is called '/mine'"),
    ("measure_runs.py no_model.json out.jsonl", "names the model 'n'"),
    ("measure_runs.py plan.json out.jsonl --jobs 0", "'0' is not a whole number of 1 or more"),
    ("measure_serving.py none.json out.jsonl", "none.json does not exist"),
    ("measure_serving.py plan.json out.jsonl", "the case a has no task"),
    ("provoke_oom.py", "name a file for the rows"),
    ("provoke_oom.py out.jsonl --only nope", "invalid choice: 'nope'"),
    ("record_deepspeed.py", "start every rank with RANK and WORLD_SIZE"),
    ("record_nvme.py", "the following arguments are required: FOLDER"),
    ("record_nvme.py mine", "start every rank with RANK and WORLD_SIZE"),
    ("record_stages.py nope", "invalid choice: 'nope'"),
    ("verify_presets.py nope", "nope"),
    ("verify_presets.py 24gb_lora", "there is no CUDA GPU here"),
    ("write_figures.py none.jsonl", "none.jsonl does not exist"),
    ("write_figures.py plan.json", "plan.json, line 1 is no row of results"),
    ("write_figures.py some.jsonl", "the row of 24gb_lora has no peak_gib"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a user has, and mistakes for what a script wants."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    for name, change in {
        "leads_out": {"id": "../../mine"}, "absolute": {"id": "/mine"}, "no_model": {"model": "n"},
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(PLAN | {"cases": [CASE | change]}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/cases.json").write_text(json.dumps(PLAN))
    (tmp_path / "broken/measured.jsonl").write_text('{"id": "a", "ok": true}\nhalf a li')
    (tmp_path / "some.jsonl").write_text('{"name": "24gb_lora", "ok": true}\n')
    return tmp_path


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("command", "said"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_message_and_changes_nothing(
    run: Callable[..., Any], folder: Path, tmp_path_factory: pytest.TempPathFactory, command: str, said: str
) -> None:
    before = held(folder)
    env = {"CUDA_VISIBLE_DEVICES": "", "MEASURE_ROOT": str(tmp_path_factory.mktemp("measure"))}
    done = run(["python", SCRIPTS / command.split()[0], *command.split()[1:]], cwd=folder, env=env)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    (line,) = re.findall(r"^(?:\w+\.py: )?error: .*", done.stderr, re.MULTILINE)
    assert done.stderr.rstrip().endswith(line)  # after argparse's usage, if there is one
    assert held(folder) == before


def test_a_folder_with_something_else_is_not_taken_for_what_is_deleted(run: Callable[..., Any], folder: Path) -> None:
    command = ["python", SCRIPTS / "measure_runs.py", "plan.json", "out.jsonl"]
    done = run(command, cwd=folder, env={"CUDA_VISIBLE_DEVICES": "", "MEASURE_ROOT": "mine"})
    assert done.returncode == 2
    assert done.stderr == "error: mine holds something else: let MEASURE_ROOT name a new or an empty folder\n"
    assert [file.name for file in (folder / "mine").iterdir()] == ["thesis.txt"]


def test_a_folder_that_scripts_made_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEASURE_ROOT", str(tmp_path / "new"))
    for _ in range(2):
        command_line.claim(tmp_path / "new", "MEASURE_ROOT")
        (tmp_path / "new/models").mkdir(exist_ok=True)
    with pytest.raises(SystemExit) as ended:
        command_line.claim(tmp_path / "new" / command_line.MARK / "file", "MEASURE_ROOT")
    assert ended.value.code == 2


def test_a_link_to_another_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(FileExistsError, match="is a link to mine"):
        build_tiny_model.link_to(tmp_path / build_tiny_model.BUILD, tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "mine"
    (tmp_path / "old").symlink_to(tmp_path / "tiny-qwen3-0")
    for name in ("old", "new"):
        build_tiny_model.link_to(tmp_path / build_tiny_model.BUILD, tmp_path / name)
        assert os.readlink(tmp_path / name) == str(tmp_path / build_tiny_model.BUILD)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "link", "old", "new"}


def test_the_grid_is_written_only_when_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_oracle, "TABLE", tmp_path / "grid.jsonl")
    known = compare_oracle.read()
    monkeypatch.setattr(compare_oracle, "read", lambda: known)
    (tmp_path / "grid.jsonl").write_text("as it was")
    monkeypatch.setattr(sys, "argv", ["compare_oracle.py", "--count", "2"])
    compare_oracle.main()
    assert held(tmp_path) == {"grid.jsonl": b"as it was"}
    monkeypatch.setattr(sys, "argv", ["compare_oracle.py", "--count", "2", "--accept"])
    compare_oracle.main()
    assert len((tmp_path / "grid.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "grid.md").read_text().startswith("# Formula and simulation")


def test_a_record_is_written_only_when_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    file.write_text("as it was")
    command_line.tell_record(file, {"runs": 1}, accept=False)
    assert json.loads(capsys.readouterr().out) == {"runs": 1} and file.read_text() == "as it was"
    command_line.tell_record(file, {"runs": 1}, accept=True)
    assert json.loads(file.read_text()) == {"runs": 1} and held(tmp_path).keys() == {"record.json"}
    for script in SCRIPTS.glob("record_*.py"):
        assert "FILE.write" not in script.read_text(encoding="utf-8"), script


def test_nothing_is_written_where_one_of_several_files_has_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    (tmp_path / "README.md").write_text("a README without marks")
    names = {"ROOT": "", "RECORD": "presets/measured.json", "SPEED": "presets/speed.json", "README": "README.md"}
    for name, path in names.items():
        monkeypatch.setattr(write_figures, name, tmp_path / path)
    before = held(tmp_path)
    monkeypatch.setattr(sys, "argv", ["write_figures.py"])
    with pytest.raises(SystemExit):
        write_figures.main()
    assert "README.md does not have `<!-- presets: written by" in capsys.readouterr().err
    assert held(tmp_path) == before


def test_a_folder_of_a_user_is_no_virtual_environment(run: Callable[..., Any], folder: Path) -> None:
    env = {"LLAMAFACTORY_PREFLIGHT_VENV": str(folder / "mine"), "PYTHON": sys.executable}
    done = run(["bash", SCRIPTS / "quickstart.sh"], cwd=folder, env=env)
    assert done.returncode == 1
    assert "holds something else than a virtual environment" in done.stderr and len(done.stderr.splitlines()) == 1
    assert [file.name for file in (folder / "mine").iterdir()] == ["thesis.txt"]
