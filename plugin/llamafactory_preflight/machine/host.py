"""What this machine's main memory and disk still hold, container limits included."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamafactory_preflight.machine import cgroups


MEMINFO = Path("/proc/meminfo")
KERNEL = Path("/proc/sys/kernel/osrelease")


@dataclass(frozen=True, kw_only=True, slots=True)
class MainMemory:
    """Main memory as a new process finds it; swap is not counted, as a training that swaps stands still.

    Attributes:
        available_bytes: What it may take: the machine's `MemAvailable`, or less where a cgroup limits it.
        total_bytes: What the machine has.
        limit_bytes: The cgroup limit that decides, or None where the machine does.
        limited_by: The folder of that cgroup, or None likewise.
    """

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None = None
    limited_by: Path | None = None


def main_memory(
    *,
    meminfo: Path = MEMINFO,
    process: Path = cgroups.PROCESS,
    default_mount: Path = cgroups.DEFAULT_MOUNT,
) -> MainMemory | None:
    """Reads what is available now, or None where the system does not tell (not Linux)."""
    try:
        text = meminfo.read_text(encoding="utf-8")
    except OSError:
        return None
    rows = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemAvailable" not in rows:
        return None
    available = rows["MemAvailable"]
    total = rows.get("MemTotal", available)
    tightest = min(cgroups.limits(process, default_mount), key=lambda group: group.free_bytes, default=None)
    if tightest is None or tightest.free_bytes >= available:
        return MainMemory(available_bytes=available, total_bytes=total)
    return MainMemory(
        available_bytes=tightest.free_bytes,
        total_bytes=total,
        limit_bytes=tightest.limit_bytes,
        limited_by=tightest.folder,
    )


def available_bytes() -> int | None:
    """Main memory that a new process may take, or None where the system does not tell."""
    memory = main_memory()
    return memory.available_bytes if memory else None


def existing_parent(path: Path) -> Path | None:
    """The folder that `path` will be created in, or None where nothing of it can be reached."""
    for folder in (path.absolute(), *path.absolute().parents):
        try:
            if folder.is_dir():
                return folder
        except OSError:
            continue
    return None


def free_disk_bytes(path: Path) -> int | None:
    """Free space where `path` is or will be created, or None where it cannot be told."""
    existing = existing_parent(path)
    try:
        return shutil.disk_usage(existing).free if existing else None
    except OSError:
        return None


def file_system(path: Path) -> int | None:
    """A number for the file system that `path` is or will be created on, or None where it cannot be told."""
    existing = existing_parent(path)
    try:
        return existing.stat().st_dev if existing else None
    except OSError:
        return None


def is_wsl(environ: Mapping[str, str], *, kernel: Path = KERNEL) -> bool:
    """Whether this Linux runs inside Windows (WSL); its kernel carries the vendor's name."""
    try:
        return "microsoft" in kernel.read_text(encoding="utf-8").lower()
    except OSError:
        return "WSL_DISTRO_NAME" in environ
