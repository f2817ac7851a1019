"""Who holds memory of a card: names for process identifiers, and which of them are this run's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath


PROC = Path("/proc")
FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, 0xEFFFFFFC: outside of any container
LONGEST_NAME = 40
RUNTIMES = ("python", "bash", "sh", "node", "ruby", "perl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process on a card.

    Attributes:
        pid: Its identifier; in a container, possibly the host's.
        name: Its program, and of an interpreter the script too; None where it cannot be told. Never its arguments,
            which may hold secrets.
        used_bytes: What it holds, or None where the driver does not say (Windows, WSL).
    """

    pid: int
    name: str | None = None
    used_bytes: int | None = None


def name_of(pid: int, *, proc: Path = PROC) -> str | None:
    """The program of a process, such as `python train.py`, or None where it cannot be read or may be another's.

    In a container the driver may give the host's identifiers, under which something else runs here. A name is believed
    there only if that process has one of the driver's device files open.
    """
    folder = proc / str(pid)
    if not _is_first_namespace(proc) and not _has_device_open(folder):
        return None
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        shown = _base(words[0]) or (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    if shown.startswith(RUNTIMES):
        script = next((word for word in words[1:] if word and not word.startswith("-")), "")
        shown = f"{shown} {_base(script)}"
    printable = "".join(character if character.isprintable() else "?" for character in shown).strip()
    return f"{printable[: LONGEST_NAME - 3]}..." if len(printable) > LONGEST_NAME else printable or None


def is_ours(pid: int, environ: Mapping[str, str], *, proc: Path = PROC) -> bool:
    """Whether a process belongs to this run: it is this one, or under torchrun another rank."""
    if pid == os.getpid():
        return True
    return "LOCAL_RANK" in environ and _parent(proc / str(pid)) == os.getppid()


def _base(word: str) -> str:
    # A script of one line (`python -c ...`) is no name.
    return PurePath(word.replace("\\", "/")).name if "\n" not in word and ";" not in word and " " not in word else ""


def _is_first_namespace(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self" / "ns" / "pid") == FIRST_NAMESPACE
    except OSError:
        return False


def _has_device_open(folder: Path) -> bool:
    try:
        return any(os.readlink(file).startswith(("/dev/nvidia", "/dev/kfd")) for file in (folder / "fd").iterdir())
    except OSError:
        return False


def _parent(folder: Path) -> int | None:
    try:
        # The name before it stands in brackets and may itself hold spaces and brackets.
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
