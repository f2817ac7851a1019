"""Ascend NPUs, as their `npu-smi info` shows them: there is no library for it that starts nothing on the device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamafactory_preflight.device import choice, processes
from llamafactory_preflight.device.card import Device
from llamafactory_preflight.device.command import output
from llamafactory_preflight.device.processes import Process
from llamafactory_preflight.units import MIB


# A device takes two rows, `| NPU  name | health | ... |` and `| chip | bus | AICore  used / total  used / total |`.
NAME_ROW = re.compile(r"\|\s*(\d+)\s+(\S.*?)\s*\|[^|:]*\|[^|]*\|\s*")
MEMORY_ROW = re.compile(r"\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-fx]{2,8}:[^|]*\|([^|]*)\|\s*")
PROCESS_ROW = re.compile(r"\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*([^|]*?)\s*\|\s*(\d+)\s*\|.*")


def devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The NPUs that torch_npu would see, in its order; ASCEND_RT_VISIBLE_DEVICES chooses."""
    return listed(output("npu-smi", "info") or "", environ)


def listed(text: str, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The same from the text of `npu-smi info`."""
    lines = text.splitlines()
    holders = _holders(lines)
    every: list[Device] = []
    npu, name = "", "Ascend"
    for line in lines:
        if memory := MEMORY_ROW.fullmatch(line):
            sizes = [(int(used) * MIB, int(all_) * MIB) for used, all_ in re.findall(r"(\d+) */ *(\d+)", memory[2])]
            used, total = next((size for size in reversed(sizes) if size[1]), (0, 0))
            running = holders.get((npu, memory[1]), [])
            others = tuple(process for process in running if not processes.is_ours(process.pid, environ))
            own = sum(process.used_bytes or 0 for process in running if process not in others)
            every.append(
                Device(
                    name=name,
                    total_bytes=total or None,
                    free_bytes=max(0, total - used + own) if total else None,
                    processes=others,
                    kind="npu",
                    physical_index=len(every),
                    # An idle NPU shows some GiB as used, which nothing can have.
                    reserved_bytes=max(0, used - sum(process.used_bytes or 0 for process in running)),
                )
            )
        elif title := NAME_ROW.fullmatch(line):
            npu, name = title[1], f"Ascend {title[2]}" if not title[2].startswith("Ascend") else title[2]
    numbers = choice.chosen(environ.get("ASCEND_RT_VISIBLE_DEVICES"), count=len(every), uuids=[])
    return tuple(replace(every[number], index=place) for place, number in enumerate(numbers))


def _holders(lines: Sequence[str]) -> dict[tuple[str, str], list[Process]]:
    found: dict[tuple[str, str], list[Process]] = {}
    for row in filter(None, map(PROCESS_ROW.fullmatch, lines)):
        process = Process(pid=int(row[3]), name=row[4] or None, used_bytes=int(row[5]) * MIB)
        found.setdefault((row[1], row[2]), []).append(process)
    return found
