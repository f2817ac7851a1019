from __future__ import annotations

from importlib import metadata

import pytest

from llamafactory_preflight.software import Software, release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.9.1+cu128", (2, 9, 1)), ("0.9.6.dev0", (0, 9, 6)), ("5.6.0", (5, 6, 0)), ("unknown", ())],
)
def test_release_of(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


def test_at_least_compares_numbers_and_not_text() -> None:
    software = Software(torch="2.10.0+cu130")
    assert software.at_least("torch", 2, 8)
    assert not software.at_least("torch", 2, 11)
    assert not software.at_least("deepspeed", 0)


def test_installed_agrees_with_the_metadata() -> None:
    software = Software.installed()
    assert software.llamafactory == metadata.version("llamafactory")
    assert software.torch == metadata.version("torch")
    assert software.as_dict()["transformers"] == metadata.version("transformers")
