"""Reads a memory snapshot of torch: what was alive when, of which kind, and which module made it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


KINDS = ("weights", "adapters", "optimizer", "gradients", "activations", "logits", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One allocation.

    Attributes:
        address: Where it lies.
        size: Bytes.
        kind: One of `KINDS`.
        owner: The parameter it belongs to, or the module that was running.
        place: File, function and line that asked for it, or an empty string.
    """

    address: int
    size: int
    kind: str
    owner: str
    place: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What was noted while the step ran.

    Attributes:
        named: Kind and name of tensors by address: parameters, gradients and optimizer states.
        modules: When which module began or ended: microseconds and the innermost one from then on, in order.
        optimizer_at: Microseconds at which the optimizer step began.
        logits_bytes: Least size of what counts as logits: tokens of the batch times the vocabulary, two bytes each.
    """

    named: Mapping[int, tuple[str, str]]
    modules: Sequence[tuple[int, str]]
    optimizer_at: int
    logits_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step.

    Attributes:
        times: Microseconds since its begin.
        sizes: Bytes alive at each of them, by kind.
        at_peak: What was alive when the sum was highest, the largest first.
    """

    times: tuple[int, ...]
    sizes: Mapping[str, tuple[int, ...]]
    at_peak: tuple[Block, ...]


def timeline(snapshot: Mapping[str, Any], marks: Marks, *, device: int = 0) -> Timeline:
    """Follows every allocation of a recorded step.

    Args:
        snapshot: As `torch.cuda.memory._snapshot()` returns it at the end of the step.
        marks: What was noted meanwhile.
        device: Index of the GPU.
    """
    trace = [entry for entry in snapshot["device_traces"][device] if entry["action"] in ("alloc", "free_requested")]
    alive = {block.address: block for block in _from_before(snapshot["segments"], trace, marks, device)}
    totals = dict.fromkeys(KINDS, 0)
    for block in alive.values():
        totals[block.kind] += block.size
    start = trace[0]["time_us"] if trace else 0
    times, columns = [0], {kind: [size] for kind, size in totals.items()}
    highest, at_peak = sum(totals.values()), dict(alive)
    for entry in trace:
        if entry["action"] == "alloc":
            block = _made(entry, marks)
            alive[block.address] = block
            totals[block.kind] += block.size
        else:
            freed = alive.pop(entry["addr"], None)
            if freed is None:
                continue
            totals[freed.kind] -= freed.size
        if sum(totals.values()) > highest:
            highest, at_peak = sum(totals.values()), dict(alive)
        times.append(entry["time_us"] - start)
        for kind, size in totals.items():
            columns[kind].append(size)
    largest = sorted(at_peak.values(), key=lambda block: -block.size)
    sizes = {kind: tuple(column) for kind, column in columns.items()}
    return Timeline(times=tuple(times), sizes=sizes, at_peak=tuple(largest))


def _from_before(
    segments: Iterable[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], marks: Marks, device: int
) -> Iterable[Block]:
    """What was alive when the recording began: what is freed without having been made, and what stayed."""
    made: set[int] = set()
    touched: set[int] = set()
    for entry in trace:
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        elif entry["addr"] not in made and entry["addr"] not in touched:
            yield _old(entry["addr"], entry["size"], marks)
        touched.add(entry["addr"])
    for segment in segments:
        if segment.get("device", 0) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in touched:
                yield _old(block["address"], block.get("requested_size", block["size"]), marks)


def _old(address: int, size: int, marks: Marks) -> Block:
    kind, owner = marks.named.get(address, ("other", "made before the step"))
    return Block(address=address, size=size, kind=kind, owner=owner, place="")


def _made(entry: Mapping[str, Any], marks: Marks) -> Block:
    position = bisect_right(marks.modules, entry["time_us"], key=lambda mark: mark[0]) - 1
    running = marks.modules[position][1] if position >= 0 else ""
    kind, owner = marks.named.get(entry["addr"], ("", ""))
    if kind not in ("gradients", "optimizer"):  # an address that is used again belongs to a parameter no longer
        in_optimizer = entry["time_us"] >= marks.optimizer_at
        is_logits = not in_optimizer and entry["size"] >= marks.logits_bytes > 0
        kind = "optimizer" if in_optimizer else "logits" if is_logits else "activations"
        owner = running or ("the optimizer" if in_optimizer else "loss or backward")
    return Block(address=entry["addr"], size=entry["size"], kind=kind, owner=owner, place=_place(entry))


def _place(entry: Mapping[str, Any]) -> str:
    for frame in entry.get("frames") or ():
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "/torch/" not in file:
            return f"{file.rpartition('/')[2]}:{frame.get('line')} {frame.get('name')}"
    return ""
