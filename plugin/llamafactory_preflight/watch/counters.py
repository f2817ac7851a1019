"""Reads how much memory is in use: the caching allocator's own counters, which need no synchronization."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from llamafactory_preflight.machine import host
from llamafactory_preflight.settings import is_enabled


STATUS = Path("/proc/self/status")


class Reading(NamedTuple):
    """Bytes in use now, and the most since the last call of `restart`."""

    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int


class Counters(Protocol):
    """What memory a process uses, and used at its height."""

    on_gpu: bool

    def read(self) -> Reading:
        """All of it at once."""

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

    def read(self) -> Reading:
        """All of it at once."""
        # max_memory_allocated would flatten the same mapping first, which takes four times as long.
        stats = torch.cuda.memory_stats_as_nested_dict()
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(allocated["peak"], reserved["peak"], allocated["current"], reserved["current"])

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

    def read(self) -> Reading:
        """Peak and present size, each twice."""
        peak, resident = _status("VmHWM", "VmRSS")
        return Reading(peak, peak, resident, resident)

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
    return _status("VmHWM")[0]


def host_room_bytes() -> int | None:
    """What this process can still have of main memory, its own limit of address space included."""
    room = host.available_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return room
    left = max(0, limit - _status("VmSize")[0])
    return left if room is None else min(left, room)


def _status(*names: str) -> list[int]:
    """Sizes by their names in the system's file on this process; 0 where it has none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        lines = []
    sizes = {line[: line.index(":")]: line.split()[1] for line in lines if line.startswith(names)}
    return [int(sizes.get(name, 0)) * 1024 for name in names]
