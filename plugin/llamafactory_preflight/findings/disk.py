"""Disks that are too small for what a run writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from llamafactory_preflight.machine import checkpoint_size, host
from llamafactory_preflight.machine.checkpoint_size import Checkpoint, num_saved
from llamafactory_preflight.machine.disk import Need, checkpoints, shortages
from llamafactory_preflight.model import hub
from llamafactory_preflight.phrases import joined, phrase
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.run import RunDescription


ROOM_TO_WORRY = 10
PARTS = {
    "weights": "{weights} for the weights to download",
    "checkpoints": "{checkpoints} for checkpoints",
    "data": "{data} for the cache of the data",
    "offloaded": "{offloaded} for what DeepSpeed offloads",
}
FEWER = "Fewer of them: save_total_limit=1, save_only_model=true."


def disk_space(run: RunDescription, needs: Sequence[Need], checkpoint: Checkpoint | None = None) -> Iterator[Finding]:
    """What goes to the same file system, added up, against what is free there."""
    found = tuple(shortages(needs))
    for shortage in found:
        first = shortage.needs[0]
        parts = joined(" and ", (PARTS[kind] for kind in dict.fromkeys(need.kind for need in shortage.needs)))
        certain = sum(need.certain for need in shortage.needs) > shortage.free
        amounts: dict[str, int] = {}
        for need in shortage.needs:
            amounts[need.kind] = amounts.get(need.kind, 0) + need.size
        saves = next((need for need in shortage.needs if need.kind == "checkpoints"), None)
        smaller = {"save_total_limit": 1, "save_only_model": True} if saves else None
        message = phrase(
            "The run writes about {parts}, and {free} are free at {folder}.", parts=parts, folder=first.folder
        )
        yield Finding(
            id=f"disk-{first.kind}",
            severity="error" if certain else "warning",
            message=joined(" ", (message, FEWER)) if saves else message,
            amounts=amounts | {"free": shortage.free},
            set=smaller,
        )
    if not found:
        yield from _unlimited(run, needs, checkpoint)


def output_folder(run: RunDescription) -> Iterator[Finding]:
    """An `output_dir` that cannot be made or written: the Trainer finds out once the weights are loaded."""
    if not (run.do_train and run.output_dir):
        return
    folder = hub.expanded(run.output_dir).absolute()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if there.exists() and not there.is_dir():
        message = phrase(
            "`output_dir: {folder}` cannot be made: {place} is a file.", folder=run.output_dir, place=there
        )
        yield Finding(id="output-dir", severity="error", message=message)
    elif there.exists() and not os.access(there, os.W_OK | os.X_OK):
        message = phrase(
            "`output_dir: {folder}` cannot be written: you have no permission for {place}.",
            folder=run.output_dir,
            place=there,
        )
        yield Finding(id="output-dir-permission", severity="error", message=message)


def disk_after_data(result: Result, *, num_samples: int) -> Iterator[Finding]:
    """The same for checkpoints once the data says how many there will be."""
    if result.shape is None or result.serves or num_saved(result.run) is not None:
        return
    run = checkpoint_size.with_steps(result.run, num_samples=num_samples, num_devices=max(1, len(result.devices)))
    checkpoint = checkpoint_size.of_shape(run, result.shape, software=result.software)
    if checkpoint is not None:
        yield from disk_space(run, list(checkpoints(run, checkpoint)), checkpoint)


def _unlimited(run: RunDescription, needs: Sequence[Need], checkpoint: Checkpoint | None) -> Iterator[Finding]:
    """All checkpoints are kept unless there is a limit, and how many there will be depends on the data."""
    saves = next((need for need in needs if need.kind == "checkpoints"), None)
    if saves is None or checkpoint is None or run.save_total_limit or num_saved(run) is not None:
        return
    free, one = host.free_disk_bytes(saves.folder), checkpoint.model + checkpoint.states
    if free is not None and one and (room := free // one) < ROOM_TO_WORRY:
        yield Finding(
            id="checkpoints-unlimited",
            severity="info",
            message=phrase(
                "Every checkpoint of {one} is kept, and {folder} has room for {room}.",
                folder=saves.folder,
                room=room,
            ),
            amounts={"one": one},
            set={"save_total_limit": 2},
        )
