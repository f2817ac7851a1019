"""Faulty input to `llamafactory-cli template` is one message, at once."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import cli
from llamafactory_preflight.model import hub


FAULTS: dict[str, tuple[list[str], str]] = {
    "no file": (["missing.yaml"], "missing.yaml does not exist. Check the path"),
    "another file": (["a.txt"], "a.txt is not a .yaml, .yml or .json file"),
    "no model": (["a.yaml", "model_name_or_path=/no/such"], "The model folder /no/such does not exist"),
    "no number": (["a.yaml", "cutoff_len=abc"], "`cutoff_len` is 'abc', not a whole number (the command line)"),
    "below zero": (["a.yaml", "cutoff_len=-5"], "`cutoff_len` is -5 (the command line). Give 1 or more"),
    "no template": (["a.yaml", "template=qwen33"], "LLaMA-Factory has no `template: qwen33`. The nearest are qwen3"),
    "no data set": (["a.yaml", "dataset=nothere"], "data/dataset_info.json has no `nothere`, which `dataset` names"),
    "no data file": (
        ["a.yaml", "dataset=lost"],
        "data/a.json does not exist, where data/dataset_info.json says that `lost`",
    ),
    "no folder": (["a.yaml", "--html", "no/page.html"], "The folder of no/page.html does not exist (--html)"),
    "no tiny model": (
        ["a.yaml", "model_name_or_path=saves/tiny-qwen3"],
        "build_tiny_model.py --link saves/tiny-qwen3",
    ),
}


class Silent(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class NotFound(Silent):
    """Has no page at all."""

    def do_GET(self) -> None:
        self.send_error(404)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = f"model_name_or_path: {tiny_model}\nstage: sft\ndo_train: true\ntemplate: qwen3\ndataset: identity\n"
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "data").mkdir()
    known = {"identity": {"file_name": "identity.json"}, "lost": {"file_name": "a.json"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(known))
    (tmp_path / "data/identity.json").write_text('[{"instruction": "Hello", "input": "", "output": "Good day."}]')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["template", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured
    return captured.err


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    words, message = FAULTS[fault]
    assert message in complaint(capsys, *words)


def test_a_switch_that_does_not_exist_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE", "maybe")
    assert complaint(capsys, "a.yaml").startswith("LLAMAFACTORY_TEMPLATE=maybe is not a mode. Set it to one of fix")


def test_a_missing_llamafactory_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert complaint(capsys, "a.yaml").startswith("LLaMA-Factory is not installed in this environment. pip install")


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_does_not_answer_is_not_waited_for(run: Callable[..., Any], folder: Path, silent_hub: str) -> None:
    env = {"HF_ENDPOINT": silent_hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    begin = time.monotonic()
    done = run(["llamafactory-cli", "template", "a.yaml", "model_name_or_path=Qwen/Qwen3-8B"], cwd=folder, env=env)
    assert time.monotonic() - begin < 20  # the hub gets three seconds, Python and this machine the rest
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Qwen/Qwen3-8B is not in the local cache, and the hub does not answer (`model_name_or_path`). Give the folder "
        "of the model, or name a mirror in HF_ENDPOINT.\n"
    )


def test_what_is_in_the_cache_is_shown_though_the_hub_does_not_answer(
    run: Callable[..., Any], folder: Path, tiny_model: Path, root: Path, silent_hub: str
) -> None:
    repository = folder / "home/hub/models--some--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(tiny_model)
    env = {"HF_ENDPOINT": silent_hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    words = ["model_name_or_path=some/tiny", f"dataset_dir={root / 'presets/data'}", "--sample", "1"]
    begin = time.monotonic()
    done = run(["llamafactory-cli", "template", "a.yaml", *words], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--- sample 0: " in done.stdout
    assert time.monotonic() - begin < 120


def test_a_hub_answers_also_that_it_does_not_have_the_model(silent_hub: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:  # 501 to whatever is asked
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert hub.answers("a/b", {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}) is False
        server.RequestHandlerClass = NotFound
        assert hub.answers("a/b", {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}) is True
        server.shutdown()
    assert hub.answers("a/b", {"HF_ENDPOINT": silent_hub}) is False
    assert hub.answers("a/b", {"HF_ENDPOINT": "http://127.0.0.1:9"}) is False
    assert hub.answers("a/b", {"HF_HUB_OFFLINE": "1"}) is False
