"""Memory limits that control groups put on this process, of either version and at every level that can be seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


PROCESS = Path("/proc/self")
DEFAULT_MOUNT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 62  # version 1 writes "none" as the largest multiple of a page


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The limit of one memory cgroup.

    Attributes:
        folder: Where it was read.
        limit_bytes: The hard limit, or the point at which the kernel throttles, whichever is lower.
        free_bytes: How much of it is left, with the cache of files counted as free: the kernel drops that first.
    """

    folder: Path
    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Names of the files of one version (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst)."""

    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]


# At `memory.high` nothing is killed, but what goes on allocating is slowed down to a crawl.
_VERSION_2 = _Files(
    limits=("memory.max", "memory.high"), used="memory.current", cache=("inactive_file", "active_file")
)
_VERSION_1 = _Files(
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    cache=("total_inactive_file", "total_active_file"),
)


def limits(process: Path = PROCESS, default_mount: Path = DEFAULT_MOUNT) -> Iterator[Group]:
    """Every limited group from the process's own up to the root of what is mounted here.

    Args:
        process: The process's folder in /proc; `cgroup` and `mountinfo` in it are read.
        default_mount: Where groups are mounted if `mountinfo` cannot be read.
    """
    mounts = dict(_mounts(process / "mountinfo")) or {"cgroup2": (default_mount, "/")}
    for line in _lines(process / "cgroup"):
        number, controllers, own = [*line.split(":", 2), "", ""][:3]
        if number == "0" and controllers == "" and "cgroup2" in mounts:
            yield from _upwards(*mounts["cgroup2"], own, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _upwards(*mounts.get("memory", (default_mount / "memory", "/")), own, _VERSION_1)


def _mounts(file: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Mount point and mounted group of both versions; in a container the latter is the container's own group."""
    for line in _lines(file):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        place = (Path(fields[4]), fields[3])
        if kind[0] == "cgroup2":
            yield "cgroup2", place
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield "memory", place


def _upwards(mount: Path, root: str, own: str, files: _Files) -> Iterator[Group]:
    try:
        inside = PurePosixPath(own).relative_to(root)
    except ValueError:  # the path is the host's, and what is mounted here is the container's own group
        inside = PurePosixPath(own.lstrip("/"))
    folder = mount / inside
    for level in (folder, *folder.parents):
        if level != mount and mount not in level.parents:
            return
        group = _group(level, files)
        if group is not None:
            yield group


def _group(folder: Path, files: _Files) -> Group | None:
    found = [_number(folder / name) for name in files.limits]
    used, stat = _number(folder / files.used), "\n".join(_lines(folder / "memory.stat"))
    # Version 1 says here what the groups above allow, also those that a container does not see.
    found.append(_entry(stat, "hierarchical_memory_limit"))
    known = [limit for limit in found if limit is not None and limit < NO_LIMIT]
    if not known or used is None:
        return None
    cache = sum(_entry(stat, name) or 0 for name in files.cache)
    return Group(folder=folder, limit_bytes=min(known), free_bytes=max(0, min(known) - max(0, used - cache)))


def _entry(stat: str, name: str) -> int | None:
    match = re.search(rf"^{name} (\d+)$", stat, re.MULTILINE)
    return int(match.group(1)) if match else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # the latter for a path that cannot be one
        return []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isascii() and text.isdigit() else None
