from __future__ import annotations

import sys

import pytest

from llamafactory_preflight.machine import allocator


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def test_expandable_segments_are_asked_for_under_both_names() -> None:
    env: dict[str, str] = {}
    assert allocator.prefer_expandable_segments(env)
    assert env == dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


@pytest.mark.parametrize("variable", allocator.VARIABLES)
def test_what_the_user_configured_stays(variable: str) -> None:
    env = {variable: "max_split_size_mb:64"}
    assert not allocator.prefer_expandable_segments(env)
    assert env == {variable: "max_split_size_mb:64"}


def test_nothing_is_set_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    env: dict[str, str] = {}
    assert not allocator.prefer_expandable_segments(env)
    assert env == {}
    assert not allocator.expands({}, torchrun=False, hooked=True)
