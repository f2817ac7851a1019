from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.model import hub, hub_request


CONFIG = {"model_type": "qwen3", "hidden_size": 8}


PAGES = {
    "/someone/tiny/resolve/main/config.json": CONFIG,
    "/api/models/someone/tiny/tree/main": [
        {"path": "model-1.safetensors", "size": 30},
        {"path": "model-2.safetensors", "size": 12},
        {"path": "pytorch_model.bin", "size": 42},
        {"path": "config.json", "size": 1},
    ],
    "/api/v1/models/someone/tiny/repo?Revision=master&FilePath=config.json": CONFIG,
    "/api/v1/models/someone/tiny/repo/files?Revision=master": {
        "Data": {"Files": [{"Path": "model.safetensors", "Size": 7}]}
    },
}


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, `someone/tiny`, and one that needs permission."""

    def do_GET(self) -> None:
        page = PAGES.get(self.path)
        if "closed" in self.path and self.headers["Authorization"] == "Bearer secret":
            page = CONFIG
        self.send_response(200 if page is not None else 401 if "closed" in self.path else 404)
        self.end_headers()
        if page is not None:
            self.wfile.write(json.dumps(page).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """A hub that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    source = hub.find(str(write_config(tmp_path / "m")), environ={})
    assert source.config == CONFIG
    assert source.download_bytes == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no config\.json.*folder that holds config\.json"),
        ({"adapter_config.json": "{}"}, "holds an adapter"),
        ({"config.json": "{"}, "not readable JSON"),
        ({"config.json": "[]"}, "holds no JSON object"),
        ({"config.json": "[" * 100_000}, "not readable JSON"),
    ],
)
def test_a_faulty_folder(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        hub.find(str(tmp_path), environ={})


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = write_config(tmp_path / "m") / "config.json"
    with pytest.raises(UserError, match="is a file"):
        hub.find(str(file), environ={})


@pytest.mark.parametrize("name", ["./nope", "/no/such/folder", "~/nope", "a/b/c", "a" * 300 + "/b"])
def test_what_can_only_be_a_folder_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        hub.find(name, environ={"HF_ENDPOINT": "http://127.0.0.1:9"})


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "cache_dir"])
def test_the_cache_of_hugging_face(tmp_path: Path, variable: str) -> None:
    cache = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    model = cache / "models--someone--tiny"
    snapshot = write_config(model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    environ = {"HF_HUB_OFFLINE": "1"} | ({variable: str(tmp_path)} if variable != "cache_dir" else {})
    cache_dir = str(tmp_path) if variable == "cache_dir" else None
    source = hub.find("someone/tiny", cache_dir=cache_dir, environ=environ)
    assert (source.config, source.download_bytes, source.cache_dir) == (CONFIG, None, cache)
    (snapshot / "model.safetensors").write_text("x")
    assert hub.find("someone/tiny", cache_dir=cache_dir, environ=environ).download_bytes == 0


@pytest.mark.parametrize("folder", ["models/Qwen/Qwen2___5-7B", "hub/models/Qwen/Qwen2.5-7B", "Qwen/Qwen2___5-7B"])
def test_the_cache_of_modelscope(tmp_path: Path, folder: str) -> None:
    write_config(tmp_path / folder)
    environ = {"USE_MODELSCOPE_HUB": "1", "MODELSCOPE_CACHE": str(tmp_path)}
    assert hub.find("Qwen/Qwen2.5-7B", environ=environ).config == CONFIG


def test_hugging_face(endpoint: str, tmp_path: Path) -> None:
    source = hub.find("someone/tiny", environ={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)})
    assert (source.config, source.download_bytes, source.place) == (CONFIG, 42, endpoint)


def test_modelscope(endpoint: str, tmp_path: Path) -> None:
    environ = {"USE_MODELSCOPE_HUB": "1", "MODELSCOPE_DOMAIN": endpoint, "MODELSCOPE_CACHE": str(tmp_path)}
    source = hub.find("someone/tiny", environ=environ)
    assert (source.config, source.download_bytes) == (CONFIG, 7)


@pytest.mark.parametrize(("name", "message"), [("someone/none", "The hub has no"), ("someone/closed", "permission")])
def test_a_model_that_the_hub_does_not_give(endpoint: str, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hub.find(name, environ={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)})


@pytest.mark.parametrize("place", ["variable", "path", "home"])
def test_a_model_that_needs_a_token(endpoint: str, tmp_path: Path, place: str) -> None:
    file = tmp_path / "token"
    environ = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "elsewhere")}
    environ |= {
        "variable": {"HF_TOKEN": "secret"},
        "path": {"HF_TOKEN_PATH": str(file)},
        "home": {"HF_HOME": str(tmp_path)},
    }[place]
    file.write_text("secret\n")
    source = hub.find("someone/closed", environ=environ)
    assert source.config == CONFIG


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "no address", "http://a b", "https://[::1"])
def test_a_hub_that_cannot_be_reached(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(Unmodelled, match=r"cannot be reached to read config\.json"):
        hub.find("someone/a tiny one", environ={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)})


def test_a_hub_that_does_not_answer(silent_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_request, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(Unmodelled, match="cannot be reached"):
        hub.find("someone/tiny", environ={"HF_ENDPOINT": silent_endpoint, "HF_HOME": str(tmp_path)})


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline(endpoint: str, tmp_path: Path, variable: str) -> None:
    environ = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), variable: "1"}
    with pytest.raises(Unmodelled, match=f"{variable} forbids"):
        hub.find("someone/tiny", environ=environ)


@pytest.mark.parametrize("environ", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_qwen3_model_is_known_where_no_hub_can_be_asked(tmp_path: Path, environ: dict[str, str]) -> None:
    found = hub.find("Qwen/Qwen3-8B-Base", environ=environ | {"HF_HOME": str(tmp_path)})
    assert (found.config["hidden_size"], found.config["tie_word_embeddings"], found.download_bytes) == (
        4096,
        False,
        None,
    )
    assert "Qwen/Qwen3-8B-Base" in found.note
    for name, revision in (("Qwen/Qwen3-9B", "main"), ("someone/Qwen3-8B", "main"), ("Qwen/Qwen3-8B", "v2")):
        with pytest.raises(Unmodelled):
            hub.find(name, revision=revision, environ=environ | {"HF_HOME": str(tmp_path)})
