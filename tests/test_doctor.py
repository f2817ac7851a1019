from __future__ import annotations

import sys
from importlib import metadata

import pytest

from llamafactory_preflight.commands import doctor


def rows() -> dict[str, str]:
    return {line[:24].strip(): line[24:] for line in doctor.lines() if line}


def test_it_says_what_is_installed() -> None:
    found = rows()
    assert found["llamafactory"] == metadata.version("llamafactory")
    assert found["torch"] == metadata.version("torch")
    assert "preflight" in found and "main memory" in found


def test_a_hook_that_is_not_live_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [finder for finder in sys.meta_path if type(finder).__module__ != "llamafactory_preflight._startup"]
    monkeypatch.setattr(sys, "meta_path", others)
    assert rows()["startup hook"].startswith("NOT LIVE")
    assert not doctor.is_healthy()


def test_a_switch_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_PREFLIGHT", "blok")
    assert "LLAMAFACTORY_PREFLIGHT=blok is not a mode" in rows()["switches"]
