"""What this machine's main memory and disk still hold, container limits included."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path


MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes(
    *, meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, cgroup_root: Path = CGROUP_ROOT
) -> int | None:
    """Memory that a new process may take: the machine's `MemAvailable`, or less where a cgroup limits it.

    Returns:
        Bytes, or None where the system does not tell (not Linux).
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    return min([int(match.group(1)) * 1024, *_cgroup_rooms(cgroups, cgroup_root)])


def free_disk_bytes(path: Path) -> int | None:
    """Free space where `path` is or will be created, or None where it cannot be told."""
    existing = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()), None)
    try:
        return shutil.disk_usage(existing).free if existing else None
    except OSError:
        return None


def _cgroup_rooms(cgroups: Path, root: Path) -> Iterator[int]:
    """Limit minus use of every memory cgroup from this process's own up to the root."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, cache = root / "memory", "memory.limit_in_bytes", "total_inactive_file"
            used = "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's; the root of the mount is then the container's own group.
        folder = base / own.lstrip("/")
        for level in (folder, *folder.parents):
            if level != base and base not in level.parents:
                break
            room = _room(level, limit, used, cache)
            if room is not None:
                yield room


def _room(folder: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    limit = _number(folder / limit_name)
    used = _number(folder / used_name)
    if limit is None or used is None or limit >= 1 << 62:
        return None
    # The kernel drops inactive file cache before it kills, so that part counts as free.
    try:
        match = re.search(rf"^{cache_name} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return max(0, limit - used + (int(match.group(1)) if match else 0))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
