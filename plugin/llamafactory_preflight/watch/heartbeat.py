"""A file in `output_dir` that says what a process was doing last: nobody that the kernel kills can say it itself."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamafactory_preflight import whole_file
from llamafactory_preflight.machine import host
from llamafactory_preflight.watch import kills
from llamafactory_preflight.watch.state import State


FOLDER = ".preflight"
INTERVAL_SECONDS = 2.0
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VMSTAT = Path("/proc/vmstat")
STATM = Path("/proc/self/statm")


class Heartbeat:
    """Writes one process's file every few seconds, from a thread of its own; nothing is left of a run that ends well.

    Args:
        output_dir: Of the run.
        state: What to tell; only read.
    """

    def __init__(self, output_dir: Path, state: State) -> None:
        self._output_dir, self._state = output_dir, state
        self._is_new = not output_dir.exists()
        self._constant = {
            "rank": state.rank,
            "pid": os.getpid(),
            "started_at": started_at(os.getpid()),
            "machine": machine(),
            "kills_before": kills.counted(),
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="preflight-heartbeat", daemon=True)

    @property
    def file(self) -> Path:
        """Where it is written."""
        return self._output_dir / FOLDER / f"rank_{self._state.rank}.json"

    def start(self) -> None:
        """Begins to write, unless it has begun."""
        if self._thread.ident is None:
            self._write({})
            self._thread.start()

    def end(self, outcome: Mapping[str, Any] | None = None) -> None:
        """Stops; leaves an outcome for the parent to read, or nothing at all."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if outcome is not None:
            self._write({"ended": dict(outcome)})
            return
        self.file.unlink(missing_ok=True)
        _remove_empty(self.file.parent, *([self._output_dir] if self._is_new else []))

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._write({})

    def _write(self, more: Mapping[str, Any]) -> None:
        longest = self._state.longest
        beat = self._constant | {
            "beat_at": time.time(),
            "phase": self._state.phase,
            "step": self._state.step,
            "longest_batch": asdict(longest) if longest else None,
            "rss_bytes": resident_bytes(),
            "host_available_bytes": host.available_bytes(),
            **more,
        }
        with suppress(OSError):
            write_json(self.file, beat)


def left_behind(output_dir: Path) -> Iterator[dict[str, Any]]:
    """Files of processes that are gone, by rank: of this machine, or of one that has been started anew."""
    folder = output_dir / FOLDER
    files = sorted(folder.glob("rank_*.json")) if folder.is_dir() else []
    for file in files:
        with suppress(OSError, ValueError):
            beat = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(beat, dict) and not _lives(beat):
                yield beat


def clear(output_dir: Path) -> None:
    """Removes what `left_behind` tells of."""
    for beat in left_behind(output_dir):
        with suppress(OSError):
            (output_dir / FOLDER / f"rank_{beat['rank']}.json").unlink(missing_ok=True)
    _remove_empty(output_dir / FOLDER)


def machine() -> str:
    """Name of this machine and of its boot."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: an identifier can be given out again."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def resident_bytes() -> int | None:
    """What this process has in main memory."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes so that a reader sees the old file or the new one."""
    whole_file.write(file, json.dumps(content, indent=1) + "\n")


def _lives(beat: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this is still there; where nobody can look, its file's age tells."""
    if beat.get("ended"):
        return False
    began, name = beat.get("started_at"), str(beat.get("machine", "")).partition(" ")[0]
    if began is None or name != socket.gethostname():
        return time.time() - float(beat.get("beat_at", 0)) < 30 * INTERVAL_SECONDS
    pid = int(beat.get("pid", 0))
    return beat.get("machine") == machine() and pid != os.getpid() and started_at(pid) == began


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
