"""What earlier runs or children have left in `output_dir` for others to read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamafactory_preflight.watch import explain, heartbeat, kills


PATIENCE_SECONDS = 5.0


def of_killed(output_dir: str) -> list[str]:
    """What to say about processes that were killed before they could say anything."""
    beats = list(heartbeat.left_behind(Path(output_dir)))
    outcomes = {(beat.get("ended") or {}).get("outcome") for beat in beats}
    if "failed" in outcomes:  # whoever spoke was the first; torchrun ended the others
        return []
    silent = min(
        (beat for beat in beats if not beat.get("ended")), key=lambda beat: float(beat.get("beat_at", 0)), default=None
    )
    if silent is None:
        return []
    return [explain.killed(silent, cause=_cause(silent), output_dir=output_dir)]


def _cause(beat: Mapping[str, Any]) -> str:
    """What ended a process, as far as the kernel's counts tell; they begin anew with the machine."""
    here, there = heartbeat.machine().partition(" "), str(beat.get("machine", "")).partition(" ")
    if there != here:
        return "restart" if there[0] == here[0] and there[2] and here[2] else "unknown"
    before = beat.get("kills_before", {})
    where = kills.since(before)
    return where or ("nowhere" if "machine" in before and "machine" in kills.counted() else "unknown")


def of_children(output_dir: str, kills_before: Mapping[str, int]) -> list[str]:
    """What failed children have said about the end of the run, or else what is known of those that were killed."""
    folder = Path(output_dir)
    if not output_dir or not (folder / heartbeat.FOLDER).is_dir():
        return [explain.KILLED_EARLY] if kills.since(kills_before) is not None else []
    texts = [(beat.get("ended") or {}).get("explanation") for beat in heartbeat.left_behind(folder)]
    said = [text for text in texts if text][:1] or of_killed(output_dir)
    heartbeat.clear(folder)
    return said


def measured_by_others(output_dir: str, num_others: int) -> list[dict[str, Any]]:
    """What other processes of this run have measured; those that take longer to end are not waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = list(_measured(Path(output_dir) / heartbeat.FOLDER))
        if len(found) >= num_others or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _measured(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("rank_*.json")):
        with suppress(OSError, ValueError):
            measured = (json.loads(file.read_text(encoding="utf-8")).get("ended") or {}).get("measured")
            if measured is not None:
                yield measured
