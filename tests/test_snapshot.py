"""Reading torch's memory snapshots, on one written out by hand; scripts/provoke_oom.py makes real ones on a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from llamafactory_preflight.watch import snapshot
from llamafactory_preflight.watch.blocks import KINDS, Marks, Timeline, timeline
from llamafactory_preflight.watch.callback import MemoryWatch
from llamafactory_preflight.watch.snapshot import StepSnapshot
from llamafactory_preflight.watch.state import State


GIB = 2**30
FRAMES = [
    {"filename": "/site/torch/nn/functional.py", "line": 5, "name": "linear"},
    {"filename": "/site/transformers/models/qwen3/modeling_qwen3.py", "line": 88, "name": "forward"},
]


def entry(action: str, address: int, size: int, at: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": at, "stream": 0, "frames": FRAMES}


SNAPSHOT = {
    "device_traces": [
        [
            entry("segment_map", 0, 99, 900),
            entry("alloc", 100, 2 * GIB, 1000),  # in the MLP
            entry("alloc", 200, 8 * GIB, 1010),  # logits
            entry("free_requested", 200, 8 * GIB, 1020),
            entry("free_completed", 200, 8 * GIB, 1020),
            entry("alloc", 300, 1 * GIB, 1030),  # a gradient
            entry("free_requested", 100, 2 * GIB, 1040),
            entry("alloc", 400, 3 * GIB, 1060),  # an optimizer state
            entry("alloc", 500, 1 * GIB, 1061),  # what the optimizer needs meanwhile
            entry("free_requested", 500, 1 * GIB, 1062),
            entry("free_requested", 300, 1 * GIB, 1070),
            entry("free_requested", 20, 1 * GIB, 1071),  # made before the step
        ]
    ],
    "segments": [
        {
            "device": 0,
            "blocks": [
                {"address": 10, "size": 4 * GIB, "state": "active_allocated"},
                {"address": 400, "size": 3 * GIB, "state": "active_allocated"},
                {"address": 600, "size": GIB, "state": "inactive"},
            ],
        }
    ],
}
MARKS = Marks(
    named={10: ("weights", "model.embed"), 300: ("gradients", "lora_A"), 400: ("optimizer", "exp_avg")},
    modules=[(990, "model"), (995, "model.layers.0.mlp"), (1005, "model"), (1015, "")],
    optimizer_at=1050,
    logits_bytes=8 * GIB,
)


@pytest.fixture
def seen() -> Timeline:
    return timeline(SNAPSHOT, MARKS)


def test_the_kinds_add_up_at_every_moment(seen: Timeline) -> None:
    totals = [sum(seen.sizes[kind][place] for kind in KINDS) // GIB for place in range(len(seen.times))]
    assert totals == [5, 7, 15, 7, 8, 6, 9, 10, 9, 8, 7]
    assert seen.times[0] == 0 and list(seen.times) == sorted(seen.times)
    assert seen.sizes["optimizer"][-1] == 3 * GIB and seen.sizes["gradients"][-1] == 0


def test_blocks_at_the_peak_have_owner_kind_and_place(seen: Timeline) -> None:
    assert [(block.size // GIB, block.kind, block.owner) for block in seen.at_peak] == [
        (8, "logits", "model"),
        (4, "weights", "model.embed"),
        (2, "activations", "model.layers.0.mlp"),
        (1, "other", "made before the step"),
    ]
    assert seen.at_peak[0].place == "modeling_qwen3.py:88 forward"


def test_a_step_without_allocations_is_what_was_there() -> None:
    empty = timeline({"device_traces": [[]], "segments": SNAPSHOT["segments"]}, MARKS)
    assert sum(block.size for block in empty.at_peak) == 7 * GIB


def test_table_and_picture_are_written(seen: Timeline, tmp_path: Path) -> None:
    lines = snapshot.table(seen).splitlines()
    assert lines[1].split()[:3] == ["8.00", "GiB", "logits"] and "modeling_qwen3.py:88" in lines[1]
    assert "4.00 GiB  weights" in lines[-7]
    file = tmp_path / "step_3.png"
    snapshot.picture(seen, file, title="GPU memory of step 3")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


class Slow(StepSnapshot):
    """One that takes its time, and cannot begin a second step."""

    def begin(self, model: torch.nn.Module) -> None:
        time.sleep(0.2)
        if self.step == 2:
            raise OSError("no space left")


def watching(step: int, folder: Path) -> MemoryWatch:
    watch = MemoryWatch(State(), expected_bytes=lambda: None, beside=[])
    watch._snapshot = Slow(step, folder)
    watch.on_step_begin(None, TrainerState(global_step=step - 1), TrainerControl(), model=torch.nn.Linear(2, 2))
    return watch


def test_the_time_that_a_snapshot_takes_was_asked_for_and_counts_apart(tmp_path: Path) -> None:
    watch = watching(1, tmp_path)
    assert not watch.is_broken and watch.state.watch_seconds < 0.1


def test_a_snapshot_that_fails_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = watching(2, tmp_path)
    assert not watch.is_broken and watch._snapshot is None
    assert "no memory snapshot (OSError: no space left)" in capsys.readouterr().err


def test_a_step_that_never_came_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = watching(1, tmp_path)
    assert watch._snapshot is not None
    watch.on_train_end(None, TrainerState(global_step=4), TrainerControl())
    assert "no memory snapshot: step 1 did not come, the last was 4" in capsys.readouterr().err
