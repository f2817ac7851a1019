"""Reads how much memory is in use: the caching allocator's own counters, which need no synchronization."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Protocol

import torch

from llamafactory_preflight import host
from llamafactory_preflight.settings import is_enabled


STATUS = Path("/proc/self/status")


class Counters(Protocol):
    """Peaks since the last call of `restart`, in bytes."""

    on_gpu: bool

    def peaks(self) -> tuple[int, int]:
        """Allocated and reserved."""

    def current(self) -> tuple[int, int]:
        """Allocated and reserved now."""

    def restart(self) -> None:
        """Begins a new peak."""

    def free(self) -> int | None:
        """What the card has free. Asks the driver, so not for every step."""


class CudaCounters:
    """Of the current CUDA device.

    Where somebody else reads the peak at the end (RECORD_VRAM, `skip_memory_metrics: false`), it is never restarted:
    a phase's peak is then the highest up to its end.
    """

    on_gpu = True

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared

    def peaks(self) -> tuple[int, int]:
        """Allocated and reserved."""
        # max_memory_allocated would flatten the same mapping first, which takes four times as long.
        stats = torch.cuda.memory_stats_as_nested_dict()
        return stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"]

    def current(self) -> tuple[int, int]:
        """Allocated and reserved now."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]

    def restart(self) -> None:
        """Begins a new peak."""
        if not self._shared:
            torch.cuda.reset_peak_memory_stats()

    def free(self) -> int | None:
        """What the card has free."""
        return int(torch.cuda.mem_get_info()[0])


class HostCounters:
    """Resident memory of this process, for a run on the CPU; its peak cannot be restarted."""

    on_gpu = False

    def peaks(self) -> tuple[int, int]:
        """The peak, twice."""
        peak = host_peak_bytes()
        return peak, peak

    def current(self) -> tuple[int, int]:
        """What is resident now, twice."""
        resident = _status("VmRSS")
        return resident, resident

    def restart(self) -> None:
        """Does nothing."""

    def free(self) -> int | None:
        """There is no card."""
        return None


def counters(*, device_type: str, other_reader: bool) -> Counters:
    """Those of the device that a training uses.

    Args:
        device_type: As in `TrainingArguments.device.type`.
        other_reader: Whether the Trainer keeps memory metrics of its own.
    """
    if device_type == "cuda":
        return CudaCounters(shared=other_reader or is_enabled(os.environ, "RECORD_VRAM"))
    return HostCounters()


def host_peak_bytes() -> int:
    """The most that was resident of this process, or 0 where the system does not tell."""
    return _status("VmHWM")


def host_room_bytes() -> int | None:
    """What this process can still have of main memory, its own limit of address space included."""
    room = host.available_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return room
    left = max(0, limit - _status("VmSize"))
    return left if room is None else min(left, room)


def _status(name: str) -> int:
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0
