"""The GPU of a Mac with Apple silicon, which shares main memory."""

from __future__ import annotations

import platform
import re

from llamafactory_preflight.device.card import Device
from llamafactory_preflight.device.command import output
from llamafactory_preflight.units import GIB, MIB


def devices() -> tuple[Device, ...]:
    """The one GPU, or none on another machine; Metal is not started."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return ()
    settings = output("sysctl", "machdep.cpu.brand_string", "hw.memsize", "iogpu.wired_limit_mb")
    if settings is None:  # macOS before 14 has no such limit, and sysctl then fails as a whole
        settings = output("sysctl", "machdep.cpu.brand_string", "hw.memsize")
    return described(settings or "", output("vm_stat") or "")


def described(settings: str, pages: str) -> tuple[Device, ...]:
    """The device from the texts of `sysctl` and `vm_stat`.

    What Metal recommends as the largest working set is two thirds of main memory up to 36 GiB and three quarters
    beyond, unless `iogpu.wired_limit_mb` is set: as commonly seen, not documented by Apple and not measured here.
    """
    values = dict(re.findall(r"^([\w.]+): (.*)$", settings, re.MULTILINE))
    memory = int(values.get("hw.memsize", "0"))
    if not memory:
        return ()
    limit = int(values.get("iogpu.wired_limit_mb", "0")) * MIB
    total = limit or (memory * 2 // 3 if memory <= 36 * GIB else memory * 3 // 4)
    available = _available(pages)
    name = values.get("machdep.cpu.brand_string", "Apple GPU")
    return (
        Device(
            name=name, total_bytes=total, free_bytes=None if available is None else min(total, available), kind="mps"
        ),
    )


def _available(pages: str) -> int | None:
    """What macOS can give at once: free pages and those it may drop."""
    size = re.search(r"page size of (\d+) bytes", pages)
    counts = dict(re.findall(r"^Pages ([\w ]+): +(\d+)\.$", pages, re.MULTILINE))
    if size is None or "free" not in counts:
        return None
    return sum(int(counts.get(kind, 0)) for kind in ("free", "inactive", "speculative", "purgeable")) * int(size[1])
