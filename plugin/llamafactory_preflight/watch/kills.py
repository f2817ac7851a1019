"""How often the kernel has killed for want of memory: the only trace that such a kill leaves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")


def counted() -> dict[str, int]:
    """Kills so far, in this process's `cgroup` and on the whole `machine`; what the system does not tell is absent."""
    counts = {"cgroup": _in_cgroup(), "machine": _number(VMSTAT)}
    return {name: count for name, count in counts.items() if count is not None}


def since(before: Mapping[str, int]) -> str | None:
    """Where the kernel has killed since `before` was counted: `cgroup`, `machine`, or None for nowhere."""
    now = counted()
    return next(
        (name for name in ("cgroup", "machine") if now.get(name, 0) > before.get(name, now.get(name, 0))), None
    )


def _in_cgroup() -> int | None:
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:
        return None
    counts = []
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            base, file = CGROUP_ROOT, "memory.events"
        elif "memory" in controllers.split(","):
            base, file = CGROUP_ROOT / "memory", "memory.oom_control"
        else:
            continue
        # In a container the path may be the host's; the root of the mount is then the container's own group.
        found = [_number(folder / file) for folder in (base / own.lstrip("/"), base)]
        counts += [count for count in found if count is not None][:1]
    return sum(counts) if counts else None


def _number(file: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None
