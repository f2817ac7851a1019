"""LLaMA-Board for the tests: the real server, a hub that answers as told, and a page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import qwen3_shapes


# config.json of every model that presets name, and of some that none does.
CONFIGS = {
    name: qwen3_shapes.config(name)
    for size in qwen3_shapes.DENSE
    for name in (f"Qwen/Qwen3-{size}", f"Qwen/Qwen3-{size}-Instruct-2507")
}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SLOW_MODEL, SLOW_SECONDS = "slow/model", 1.5
SILENT_MODEL, SILENT_SECONDS = "silent/model", 60.0
START_SECONDS = 180
QUIET_ROUNDS, ROUND_SECONDS = 8, 0.05


def chromium() -> str | None:
    """The browser of this machine; CHROMIUM names another."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else CHROMIUM
    return next((found for name in names if (found := shutil.which(name))), None)


def fill_hub_cache(folder: Path) -> None:
    """A hub cache as finished look-ups leave it."""
    for name, config in CONFIGS.items():
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(snapshot.name, encoding="utf-8")


class _Hub(BaseHTTPRequestHandler):
    """Knows one model and takes its time; says nothing of another; hangs up on all of `down/`; has nothing else."""

    def do_GET(self) -> None:
        if self.path.startswith(f"/{SILENT_MODEL}/"):
            time.sleep(SILENT_SECONDS)
        if self.path.startswith(("/down/", f"/{SILENT_MODEL}/")):
            self.connection.close()
            return
        known = self.path.startswith(f"/{SLOW_MODEL}/resolve")
        if known:
            time.sleep(SLOW_SECONDS)
        body = json.dumps(CONFIGS["Qwen/Qwen3-0.6B"]).encode() if known else b"{}"
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    """The address of a hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def webui(folder: Path, scripts: Path, *, program: str = "", **variables: str) -> Iterator[str]:
    """The address of `llamafactory-cli webui`, started in a folder, or of a program that starts the board its way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"LLAMAFACTORY", "HF_HUB_OFFLINE", "HF_ENDPOINT", "LLAMABOARD", "USE_", "GRADIO", "DEMO_"}
    env = {name: value for name, value in os.environ.items() if not name.startswith(tuple(own))}
    env |= {
        "PATH": os.pathsep.join([str(scripts), env.get("PATH", "")]),
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "NO_PROXY": "127.0.0.1,localhost",
        "BROWSER": "true",
        "CUDA_VISIBLE_DEVICES": "",
    } | variables
    address = f"http://127.0.0.1:{port}/"
    with (folder / "webui.log").open("w") as log:
        command = [scripts / "python", "-c", program] if program else [scripts / "llamafactory-cli", "webui"]
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            _wait_for(address, server, folder / "webui.log")
            yield address
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}config", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the board did not start:\n{log.read_text()[-3000:]}")


class BoardPage:
    """LLaMA-Board in a browser tab, in the terms of a user.

    Args:
        page: Playwright's.
        address: The server's.
    """

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.console_errors: list[str] = []
        self._running: set[Any] = set()
        page.set_default_timeout(60_000)  # a busy machine takes its time
        page.on("console", lambda said: self.console_errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.console_errors.append(str(error)))
        page.on("request", lambda request: self._running.add(request) if _is_event(request.url) else None)
        for event in ("requestfinished", "requestfailed"):
            page.on(event, lambda request: self._running.discard(request))

    def open(self) -> BoardPage:
        """Loads the page, or loads it again."""
        before = list(self.console_errors)
        self.page.goto("about:blank")
        self.console_errors[:] = before  # leaving a page cuts off what it was waiting for, which it reports
        self._running.clear()
        self.page.goto(self.address)
        self.page.get_by_label("Language", exact=True).wait_for(timeout=60_000)
        self.settle()
        return self

    def settle(self, timeout: float = 120) -> None:
        """Waits until nothing is on its way to the server and back."""
        deadline, quiet = time.monotonic() + timeout, 0
        while quiet < QUIET_ROUNDS:
            assert time.monotonic() < deadline, f"still running: {[request.url for request in self._running]}"
            # In the page's own time: a page that is busy drawing has yet to ask what comes next.
            self.page.evaluate(f"() => new Promise(done => setTimeout(done, {1000 * ROUND_SECONDS}))")
            quiet = 0 if self._running else quiet + 1

    def field(self, label: str) -> Any:
        """An element by its label, which may be followed by an explanation; of a slider the number beside it."""
        labelled = self.page.get_by_label(re.compile(rf"^\s*(number input for )?{label}"))
        return labelled.locator("visible=true").first  # other tabs have fields of the same name

    def choose(self, label: str, option: str) -> None:
        """Picks an entry of a menu by its beginning."""
        field = self.field(label)
        field.click()
        self.page.get_by_role("option", name=option).first.click()
        self.settle()

    def type(self, label: str, text: str) -> None:
        """Writes into a field and leaves it."""
        field = self.field(label)
        field.fill(text)
        field.press("Tab")
        self.settle()

    def press(self, name: str, *, until: str = "", timeout: float = 120) -> None:
        """Presses a button of the visible tab, and waits until the box below the buttons says something."""
        self.page.locator("button:visible", has_text=name).first.click()
        self.settle()
        deadline = time.monotonic() + timeout
        while until and not re.search(until, self.output()):
            assert time.monotonic() < deadline, f"the output is still {self.output()!r}"
            self.page.wait_for_timeout(100)
        self.settle()

    def tab(self, name: str) -> None:
        """Goes to another tab."""
        self.page.get_by_role("tab", name=name).click()
        self.settle()

    def chat(self, text: str) -> str:
        """Says something in the Chat tab; gives the answer."""
        self.page.get_by_placeholder("Input...").fill(text)
        self.press("Submit")
        answer = self.page.locator("[data-testid=bot]:visible").last
        answer.wait_for()
        return str(answer.inner_text())

    def preset(self, tier: str, name: str) -> None:
        """Chooses a preset."""
        if self.field("GPU memory tier").input_value() != tier:
            self.choose("GPU memory tier", tier)
        self.choose("Hardware preset", f"{name}:")

    def panel(self) -> str:
        """The text of the memory panel."""
        return str(self.page.locator("#preflight-panel").inner_text())

    def changes(self) -> dict[str, str]:
        """The list of what the last preset or remedy changed, unfolded: old → new, by the name of the field."""
        listed = self.page.locator("#preflight-changes details")
        if listed.count() and listed.get_attribute("open") is None:
            listed.locator("summary").click()
        rows = self.page.locator("#preflight-changes tr:visible").all()
        return {row.locator("th").inner_text(): row.locator("td").inner_text() for row in rows}

    def output(self) -> str:
        """The text of the box below the buttons."""
        texts = self.page.locator("[data-testid=markdown]:visible").all_inner_texts()
        return str(texts[-1]) if texts else ""

    def command(self) -> dict[str, Any]:
        """The arguments in Preview's command, read as the command line would be."""
        before, deadline = self.output(), time.monotonic() + 8  # it may well be the same command as before
        self.press("Preview command", until="llamafactory-cli train")
        while self.output() == before and time.monotonic() < deadline:
            self.page.wait_for_timeout(50)
        lines = self.page.locator("code", has_text="llamafactory-cli train").first.inner_text().splitlines()
        pairs = [line.strip().removesuffix("\\").strip().removeprefix("--").split(" ", 1) for line in lines[1:]]
        return {name: {"True": True, "False": False}.get(value, value) for name, value in pairs}


def _is_event(url: str) -> bool:
    return "/run/" in url or "/queue/join" in url or "/config" in url
