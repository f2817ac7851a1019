"""What is made of an error, of a file left behind and of a measurement; messages are as the libraries write them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import whole_file
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.watch import aftermath, explain, heartbeat, kills, lookalikes, record, shortage
from llamafactory_preflight.watch.shortage import Shortage
from llamafactory_preflight.watch.state import Batch, State
from test_fit import looked_at


GIB = 2**30
CUDA = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 23.65 GiB of which 334.00 MiB is "
    "free. Process 308335 has 4.09 GiB memory in use. Including non-PyTorch memory, this process has 19.20 GiB memory "
    "in use. 21.50 GiB allowed; Of the allocated memory 11.74 GiB is allocated by PyTorch, and 6.96 GiB is reserved "
    "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1089077248 bytes. Error code 12 (Cannot allocate memory)"
)
PINNED = (
    "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
    '  File "/usr/lib/python3/site-packages/torch/utils/data/_utils/pin_memory.py", line 61, in do_one_step\n'
    "    data = pin_memory(data, device)\nRuntimeError: CUDA error: out of memory"
)


def run(**settings: Any) -> RunDescription:
    given = {"model_name_or_path": "m", "do_train": True, "bf16": True, "per_device_train_batch_size": 8}
    return RunDescription(**(given | settings))


def case(shorted: Shortage, state: State, *, budget: int, **others: Any) -> explain.Case:
    given: dict[str, Any] = {
        "shortage": shorted, "state": state, "phase": "forward_backward", "result": looked_at(run(), "8b", budget),
        "budget_bytes": budget, "room_bytes": None, "length": None, "eval_length": None, "output_dir": None,
    }  # fmt: skip
    return explain.Case(**(given | others))


def test_torch_says_what_was_asked_what_was_free_and_who_else_is_there() -> None:
    found = shortage.recognized(RuntimeError(CUDA))
    assert found is not None and found.where == "gpu"
    assert found.asked == int(2.32 * GIB) and found.free == 334 * 2**20 and found.total == int(23.65 * GIB)
    assert found.allowed == int(21.5 * GIB) and found.own == int(19.2 * GIB)
    assert found.allocated == int(11.74 * GIB) and found.idle == int(6.96 * GIB)
    assert found.others == ((308335, int(4.09 * GIB)),)


@pytest.mark.parametrize(
    ("error", "where", "asked"),
    [
        (RuntimeError(CPU), "host", 1089077248),
        (MemoryError(), "host", None),
        (OSError(12, "Cannot allocate memory"), "host", None),
        (RuntimeError("std::bad_alloc"), "host", None),
        (MemoryError("Unable to allocate 1.50 GiB for an array with shape (1,)"), "host", int(1.5 * GIB)),
        (RuntimeError(PINNED), "pinned", None),
        (RuntimeError("CUDA error: out of memory"), "gpu", None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "gpu", None),
        (RuntimeError("ncclUnhandledCudaError: Call to CUDA failed. Cuda failure 2 'out of memory'"), "gpu", None),
    ],
)
def test_memory_that_ran_out_is_recognized(error: Exception, where: str, asked: int | None) -> None:
    found = shortage.recognized(error)
    assert found is not None
    assert (found.where, found.asked) == (where, asked)


@pytest.mark.parametrize("error", [ValueError("Unknown task"), KeyError("memory"), OSError(2, "No such file")])
def test_other_errors_get_no_answer(error: Exception) -> None:
    assert shortage.recognized(error) is None
    assert lookalikes.sentence(shortage.said(error)) is None


def test_the_error_behind_an_error_counts() -> None:
    try:
        try:
            raise RuntimeError(CUDA)
        except RuntimeError as inner:
            raise ValueError("the Trainer failed") from inner
    except ValueError as outer:
        assert shortage.recognized(outer) is not None


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("RuntimeError: CUDA error: device-side assert triggered", "resize_vocab=true"),
        ("IndexError: index out of range in self", "resize_vocab=true"),
        (
            "RuntimeError: DataLoader worker (pid 1487) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
            "--shm-size",
        ),
        ("RuntimeError: DataLoader worker (pid(s) 1490) exited unexpectedly", "dataloader_num_workers=0"),
        ("RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed.", "dataloader_num_workers=0"),
        (
            "RuntimeError: One of the subprocesses has abruptly died during map operation.",
            "preprocessing_num_workers=1",
        ),
        ("AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'", "nvcc"),
        ("RuntimeError: Error building extension 'cpu_adam'", "nvcc"),
        ("RuntimeError: Caught RuntimeError in pin memory thread for device 0.", "dataloader_pin_memory=false"),
    ],
)
def test_errors_that_look_like_it_get_a_sentence(text: str, advice: str) -> None:
    assert advice in str(lookalikes.sentence(text))


def test_the_phase_is_read_off_the_traceback() -> None:
    def evaluation_loop() -> None:
        raise MemoryError

    def _save_checkpoint() -> None:
        evaluation_loop()

    with pytest.raises(MemoryError) as caught:
        _save_checkpoint()
    assert shortage.phase_of(caught.value, "load") == "evaluate"
    assert shortage.phase_of(MemoryError(), "load") == "load"


def test_the_answer_names_phase_amounts_neighbours_growth_and_remedies(tmp_path: Path) -> None:
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-120"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-20", "checkpoint-100"):  # the last one was cut off
        (tmp_path / name / "trainer_state.json").write_text("{}")
    state = State(on_gpu=True, phase="forward_backward", step=123, exceeded_at_step=17)
    state.held_bytes = {"load": int(15.35 * GIB), "steps": int(15.6 * GIB)}
    state.longest = Batch(sequences=8, tokens=2048, step=17)
    state.current = Batch(sequences=8, tokens=9000, step=123)
    shorted = Shortage(
        where="gpu", asked=8 * GIB, free=GIB, total=80 * GIB, allocated=60 * GIB, own=70 * GIB, others=((1, 4 * GIB),)
    )
    text = explain.on_gpu(case(shorted, state, budget=71 * GIB, output_dir=str(tmp_path)))
    flat = " ".join(text.split())
    assert "ran out of GPU memory in the forward or backward pass of step 123" in flat
    assert "asked for 8.00 GiB; 1.00 GiB were free of 80.00 GiB" in flat
    assert "Process 1" in flat and "has 4.00 GiB of the card" in flat
    assert "activations, gradients and logits since step 17: 52.40 GiB instead of" in flat
    assert "8 x 9000 tokens (the largest before: 8 x 2048, step 17)" in flat
    assert "enable_liger_kernel=true" in flat and "takes " in flat
    assert f"resume_from_checkpoint={tmp_path}/checkpoint-100 enable_liger_kernel=true" in flat
    assert all(len(line) <= 80 for line in text.splitlines() if "=" not in line)


@pytest.mark.parametrize(
    ("held", "name"), [({"load": 40 * GIB}, "weights"), ({"load": 16 * GIB, "steps": 40 * GIB}, "optimizer")]
)
def test_what_lies_on_the_card_between_steps_can_be_what_grew(held: dict[str, int], name: str) -> None:
    state = State(on_gpu=True, held_bytes=held)
    result = looked_at(run(), "8b", 80 * GIB)
    assert result.estimate is not None
    grown = explain.growth(Shortage(where="gpu"), state, result.estimate, "optimizer_step")
    assert grown is not None and grown.name.startswith(name)


def test_where_the_prediction_was_right_the_room_was_missing() -> None:
    result = looked_at(run(), "8b", 80 * GIB)
    assert result.estimate is not None
    parts = result.estimate.components
    state = State(on_gpu=True, held_bytes={"load": parts["weights"] + parts["adapters"]})
    text = explain.on_gpu(case(Shortage(where="gpu"), state, budget=20 * GIB))
    assert "Nothing has grown beyond the prediction" in " ".join(text.split())


def test_what_comes_on_top_of_the_prediction_is_said_and_left_room_for() -> None:
    result = looked_at(run(), "8b", 80 * GIB)
    assert result.estimate is not None
    held = result.estimate.phases["save"]
    shorted = Shortage(where="gpu", asked=4 * GIB, allocated=held, free=60 * GIB, total=80 * GIB)
    little = case(shorted, State(on_gpu=True, step=2), budget=held + 3 * GIB, phase="save")
    flat = " ".join(explain.on_gpu(little).split())
    assert "ran out of GPU memory while saving after step 2" in flat
    assert "it would be 4.00 GiB beyond the prediction" in flat and "Nothing has grown" not in flat
    assert "quantization_bit=4" in flat, "a fourth of the weights leaves room for it"
    none = case(shorted, State(on_gpu=True, step=2), budget=4 * GIB, phase="save")
    assert "No change is known with which it would fit here" in " ".join(explain.on_gpu(none).split())


def test_of_many_neighbours_the_largest_are_named() -> None:
    others = tuple((pid, pid * GIB) for pid in range(1, 9))
    flat = " ".join(explain.on_gpu(case(Shortage(where="gpu", others=others), State(), budget=9 * GIB)).split())
    assert "Process 8" in flat and "Process 5" not in flat and "5 more have 15.00 GiB" in flat


@pytest.mark.parametrize("phase", sorted(explain.HOST_REMEDIES))
def test_main_memory_that_ran_out_has_an_answer_in_every_phase(phase: str) -> None:
    state = State(on_gpu=True, step=3)
    text = explain.on_host(case(Shortage(where="host", asked=GIB), state, budget=GIB, phase=phase, room_bytes=GIB))
    assert "ran out of main memory" in text and "What lowers it:" in text
    assert "dataloader_pin_memory=false" in explain.on_host(case(Shortage(where="pinned"), state, budget=GIB))


BEATING = """
import sys, time
from pathlib import Path
from llamafactory_preflight.watch import heartbeat
from llamafactory_preflight.watch.state import Batch, State
heartbeat.INTERVAL_SECONDS = 0.05
state = State(rank=1, phase="optimizer_step", step=7)
beat = heartbeat.Heartbeat(Path(sys.argv[1]), state)
beat.start()
while not beat.file.exists():
    time.sleep(0.01)
print("beating", flush=True)
if sys.stdin.readline() == "end\\n":
    beat.end()
"""


def beating(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEATING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "beating\n"
    return process


def test_a_process_that_is_killed_is_told_of_by_the_next(tmp_path: Path) -> None:
    process = beating(tmp_path)
    assert list(heartbeat.left_behind(tmp_path)) == [], "it lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (text,) = aftermath.of_killed(str(tmp_path))
    flat = " ".join(text.split())
    assert "rank 1 ended without a word in the optimizer step of step 7" in flat and "GiB of main memory" in flat
    if kills.counted():
        assert "so something else ended it" in flat and "What lowers it" not in flat
    heartbeat.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    beating(tmp_path).communicate("end\n")
    assert not (tmp_path / heartbeat.FOLDER).exists()


def write_beat(folder: Path, rank: int, **content: Any) -> None:
    beat = {"rank": rank, "pid": 2**22 + rank, "started_at": 1, "phase": "load", "beat_at": time.time()}
    beat |= {"machine": heartbeat.machine()}
    heartbeat.write_json(folder / heartbeat.FOLDER / f"rank_{rank}.json", beat | content)


def test_of_several_ranks_the_one_that_spoke_is_heard(tmp_path: Path) -> None:
    write_beat(tmp_path, 0)
    write_beat(tmp_path, 1, ended={"outcome": "failed", "explanation": "rank 1 ran out"})
    assert aftermath.of_killed(str(tmp_path)) == []
    assert aftermath.of_children(str(tmp_path), {}) == ["rank 1 ran out"]
    assert not (tmp_path / heartbeat.FOLDER).exists()


def test_a_rank_that_finished_does_not_speak_for_one_that_was_killed(tmp_path: Path) -> None:
    write_beat(tmp_path, 0, phase="save")
    write_beat(tmp_path, 1, ended={"outcome": "finished", "measured": {}})
    (text,) = aftermath.of_killed(str(tmp_path))
    assert "rank 0 ended without a word while saving" in " ".join(text.split())


def test_a_checkpoint_in_a_folder_with_blanks_is_an_argument_to_paste(tmp_path: Path) -> None:
    last = tmp_path / "my run" / "checkpoint-2"
    last.mkdir(parents=True)
    (last / "trainer_state.json").write_text("{}")
    said = explain.resume(str(last.parent), "lora_rank=4")
    assert shlex.split(said.partition("add: ")[2]) == [f"resume_from_checkpoint={last}", "lora_rank=4"]


def test_what_the_kernel_has_counted_says_why_a_process_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _, boot = heartbeat.machine().partition(" ")
    counts = {"machine": 2, "cgroup": 0}
    for before, machine, said in (
        (counts, f"{here} {boot}", "The kernel has not killed for want of memory since then, so something else"),
        (counts | {"cgroup": -1}, f"{here} {boot}", "The kernel has killed in this container"),
        (counts | {"machine": 1}, f"{here} {boot}", "The kernel has killed on this machine"),
        ({}, f"{here} {boot}", "Main memory that ran out is the usual reason"),
        (counts, f"{here} another", "The machine has been started anew since then"),
        (counts, "elsewhere another", "Main memory that ran out is the usual reason"),
    ):
        monkeypatch.setattr(kills, "counted", lambda: counts)
        write_beat(tmp_path, 0, kills_before=before, machine=machine, beat_at=time.time() - 3600)
        (text,) = aftermath.of_killed(str(tmp_path))
        flat = " ".join(text.split())
        assert said in flat
        assert ("What lowers it" in flat) == ("something else" not in said and "anew" not in said)


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    whole_file.write(file, "old")

    def full(path: Path, text: str, **_: Any) -> int:
        with open(path, "w") as stream:
            stream.write(text[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        whole_file.write(file, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"] and file.read_text() == "old"


def test_on_the_cpu_nothing_of_a_gpu_is_zero() -> None:
    state = State(on_gpu=False, step=3, host_peak_bytes=GIB)
    measured = record.content(None, {}, [state.as_dict()], {})["measurement"]
    assert measured["peak_allocated_bytes"] is None and measured["peak_reserved_bytes"] is None
    assert (measured["host_peak_bytes"], measured["steps"]) == (GIB, 3)


def test_a_run_on_another_machine_that_still_beats_is_left_alone(tmp_path: Path) -> None:
    write_beat(tmp_path, 0, machine="elsewhere boot")
    assert aftermath.of_killed(str(tmp_path)) == []
    write_beat(tmp_path, 0, machine="elsewhere boot", beat_at=time.time() - 3600)
    assert len(aftermath.of_killed(str(tmp_path))) == 1


def test_a_number_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    parent = os.getppid()
    write_beat(tmp_path, 0, pid=parent, started_at=heartbeat.started_at(parent))
    assert aftermath.of_killed(str(tmp_path)) == []
    write_beat(tmp_path, 0, pid=parent, started_at=1)
    assert len(aftermath.of_killed(str(tmp_path))) == 1


def test_files_that_are_no_heartbeats_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / heartbeat.FOLDER).mkdir()
    (tmp_path / heartbeat.FOLDER / "rank_0.json").write_text("{")
    (tmp_path / heartbeat.FOLDER / "rank_1.json").write_text("[]")
    assert aftermath.of_children(str(tmp_path), {}) == []


def test_no_secret_is_kept() -> None:
    given = {
        "hf_hub_token": "x", "swanlab_api_key": "x", "swanlab_lark_secret": "x", "ray_init_kwargs": {"a": 1},
        "output_dir": "https://me:secret@host/x", "run_name": "hf_abcdefghijklmnopqrst", "cutoff_len": 8,
        "max_new_tokens": 3, "add_tokens": "<a>",
    }  # fmt: skip
    assert record.without_secrets(given) == {"cutoff_len": 8, "max_new_tokens": 3, "add_tokens": "<a>"}


def test_ranks_are_merged_by_the_fullest() -> None:
    states = [State(rank=rank, on_gpu=True, step=5, host_peak_bytes=GIB) for rank in (1, 0)]
    for state, size in zip(states, (2 * GIB, 3 * GIB), strict=True):
        state.phase = "forward_backward"
        state.note(size, size + 1)
        state.least_free_bytes = size
    content = record.content(None, {}, [state.as_dict() for state in states], {})
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    merged = content["measurement"]
    assert (merged["peak_allocated_bytes"], merged["least_free_bytes"]) == (3 * GIB, 2 * GIB)
    assert merged["host_peak_bytes_of_all"] == 2 * GIB
    json.dumps(content)


def test_the_line_at_the_end_says_predicted_measured_and_difference() -> None:
    result = looked_at(run(), "8b", 80 * GIB)
    assert result.estimate is not None
    state = State(on_gpu=True, phase="optimizer_step")
    state.note(result.estimate.peak_allocated_bytes + GIB, 0)
    line = record.line(result, [state.as_dict()])
    assert (
        line is not None
        and line.startswith("peak GPU memory: predicted 48.09 GiB, measured 49.09")
        and "difference +1.00 GiB (+2.1%)" in line
    )
    assert record.line(result, [State(on_gpu=True).as_dict()]) is None


def test_the_first_step_beyond_the_prediction_is_remembered() -> None:
    state = State(on_gpu=True, phase="load", expected_bytes=10)
    state.note(20, 20)
    assert state.exceeded_at_step is None
    state.phase = "forward_backward"
    for state.step, size in ((1, 9), (2, 11), (3, 12)):
        state.note(size, size)
    assert state.exceeded_at_step == 2 and state.peak().allocated == 20


def test_a_child_that_was_killed_before_it_could_write_is_told_by_the_kernels_count(tmp_path: Path) -> None:
    now = kills.counted()
    if not now:
        pytest.skip("this kernel does not count its kills")
    assert aftermath.of_children(str(tmp_path), now) == []
    (text,) = aftermath.of_children(str(tmp_path), {name: count - 1 for name, count in now.items()})
    assert "killed by the kernel because main memory ran out" in " ".join(text.split())
