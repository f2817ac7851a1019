"""Follows ZeRO-3's coordinators through an estimate, module by module, as the recordings of DeepSpeed do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llamafactory_preflight.memory.zero.stage3 import Coordinator


Forward = tuple[Coordinator, list[int]]
"""A forward, with all that follows until the next: whose it is, and a number after each module."""


def follow(
    monkeypatch: pytest.MonkeyPatch, number: Callable[[Coordinator], int] = lambda found: found.num_available
) -> list[Forward]:
    """The forwards of the estimates that are made from now on; by default the elements that are gathered."""
    forwards: list[Forward] = []
    begin, look_ahead = Coordinator.begin_forward, Coordinator._pass

    def beginning(self: Coordinator) -> None:
        begin(self)
        forwards.append((self, []))

    def passing(self: Coordinator, members: Any) -> None:
        look_ahead(self, members)
        forwards[-1][1].append(number(self))

    monkeypatch.setattr(Coordinator, "begin_forward", beginning)
    monkeypatch.setattr(Coordinator, "_pass", passing)
    return forwards


def as_recorded(forwards: Sequence[Forward]) -> list[str]:
    """The numbers of each forward as they stand in a recording."""
    return [" ".join(map(str, numbers)) for _, numbers in forwards]
