"""What the processes of one training run tell each other, through environment variables that children inherit."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


CHECKED_VARIABLE = "LLAMAFACTORY_PREFLIGHT_CHECKED"
CONFIG_VARIABLE = "LLAMAFACTORY_PREFLIGHT_CONFIG"
WARNED_VARIABLE = "LLAMAFACTORY_PREFLIGHT_WARNED"
_remembered: list[dict[str, Any] | list[str] | None] = [None]


def mark_checked(arguments: Mapping[str, Any], *, config_file: str) -> None:
    """Tells the children that these arguments were looked at, and from which file they are.

    A digest and not a flag, so that a child with other arguments checks them again.
    """
    os.environ[CHECKED_VARIABLE] = _digest(arguments)
    os.environ[CONFIG_VARIABLE] = os.path.abspath(config_file)


def is_checked(arguments: Mapping[str, Any]) -> bool:
    """Whether this process or a parent has looked at the same arguments."""
    return os.environ.get(CHECKED_VARIABLE) == _digest(arguments)


def config_file() -> str:
    """The file that the parent was started with; a Ray worker sees it nowhere else."""
    return os.environ.get(CONFIG_VARIABLE, "")


def remember(arguments: dict[str, Any] | list[str] | None) -> None:
    """Keeps what this process was started with for the second look, when the data is read."""
    _remembered[:] = [arguments]


def remembered() -> dict[str, Any] | list[str] | None:
    """What `remember` was given last, or None in a process that trains nothing."""
    return _remembered[0]


def speaks() -> bool:
    """Whether this process is the one of its machine that reports."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun and Ray Train: ranks count per machine
        return os.environ.get("LOCAL_RANK", "0") == "0"
    # LLaMA-Factory's own Ray workers all have local rank 0.
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"


def is_alone() -> bool:
    """Whether this run has one process only."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def say(message: str) -> None:
    """Writes one line to standard error, so that standard output stays LLaMA-Factory's; training goes on without."""
    with suppress(OSError, ValueError):
        print(f"llamafactory-preflight: {message}", file=sys.stderr, flush=True)


def warn_once(message: str) -> None:
    """Says something unless it was said in this tree of processes: every rank and every hook would repeat it."""
    said = os.environ.get(WARNED_VARIABLE, "").split()
    mark = hashlib.sha256(message.encode()).hexdigest()[:8]
    if mark not in said and speaks():
        os.environ[WARNED_VARIABLE] = " ".join([*said, mark])
        say(message)


def _digest(arguments: Mapping[str, Any]) -> str:
    text = repr(sorted(arguments.items(), key=lambda item: str(item[0])))
    return hashlib.sha256(text.encode()).hexdigest()
