"""Runs real LLaMA-Factory trainings without model weights, one after the other or loading side by side.

What `verify_presets.py` and `compare_speed.py` share. A run is a process, or one for each GPU, forked from one that
has imported what takes long. Several load at a time, as many as fit the card; their training steps take turns, so
that their speed is that of a card of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import command_line
import measure_ranks
import measure_runs
from measure_runs import GIB, ROOT


ENVIRONMENT = measure_runs.ENVIRONMENT | {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "4",
}
CONTEXT_GIB = 0.7


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        name: What it is called in files and tables.
        arguments: LLaMA-Factory's.
        num_gpus: One process for each.
        one_gpu: Whether all of them are on the first GPU.
        cap_gib: What the allocator of each process may take, or None.
        need_gib: What to set aside for it on the first GPU meanwhile.
        keeps_output: Whether what it saved stays, for a run that goes on from there.
        seconds: Stop after the step at which so many have passed since the first one; None runs to the last step.
        counts: Whether to count samples and tokens without padding.
        timed: Whether its speed is wanted: it has random weights, and trains while no other run does.
    """

    name: str
    arguments: dict[str, Any]
    num_gpus: int = 1
    one_gpu: bool = False
    cap_gib: float | None = None
    need_gib: float = 16.0
    keeps_output: bool = False
    seconds: float | None = None
    counts: bool = False
    timed: bool = True
    row: dict[str, Any] = field(default_factory=dict)


def card() -> dict[str, Any]:
    """Number, name, memory in bytes and compute capability of the GPUs here; no CUDA context stays behind.

    Raises:
        SystemExit: There is none.
    """
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'count': "
        "torch.cuda.device_count(), 'name': p.name, 'total': p.total_memory, 'capability': [p.major, p.minor]}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        command_line.fail(f"there is no CUDA GPU here that torch can use ({why})")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fill(model: Any) -> None:
    """Puts small random numbers in place of zeros: a GPU multiplies zeros with less power, and so faster."""
    import torch

    for parameter in model.parameters():
        if not parameter.numel():
            continue  # sharded by ZeRO-3
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            parameter.data.view(torch.uint8).random_(0, 256)
            (state.offset if state.nested else state.absmax).fill_(0.05)
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
        elif not parameter.requires_grad or bool(parameter.data.flatten()[0] == 0):
            parameter.data.normal_(std=0.02)


class _Turn:
    """The right to train now. Only the first process of a run asks for it; the others wait for that one anyway."""

    def __init__(self, needed: bool) -> None:
        self.file = open(ROOT / "turn.lock", "a") if needed else None

    def take(self) -> None:
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def give_back(self) -> None:
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_UN)


def _count(*, packed: bool) -> list[Any]:
    """Makes the Trainer count what passes through it: samples, tokens, and tokens with padding, in all so far."""
    from transformers import Trainer

    counted: list[Any] = [0, 0, 0]
    step = Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        tokens = inputs["input_ids"]
        ends = (tokens == measure_runs.WORDS.index("<|im_end|>")).sum()  # of the question and of the answer
        counted[0] += ends // 2 if packed else len(tokens)
        counted[1] += (tokens != measure_runs.WORDS.index("<|endoftext|>")).sum()  # which fills up
        counted[2] += tokens.numel()
        return step(self, model, inputs, *rest, **named)

    Trainer.training_step = training_step
    return counted


def _train(run: Run, rank: int) -> dict[str, Any]:
    import torch
    from llamafactory.train import tuner
    from transformers import TrainerCallback

    result: dict[str, Any] = {}
    turn = _Turn(run.timed and rank == 0)
    counted = _count(packed=bool(run.arguments.get("neat_packing"))) if run.counts else ()

    peak = measure_runs.peaks()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["load_peak_gib"] = peak()
            if run.timed:
                fill(kwargs["model"])
            torch.cuda.empty_cache()
            turn.take()
            peak()
            self.last = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result.setdefault("step_peaks_gib", []).append(peak())
            result["host_gib"] = max(result.get("host_gib", 0.0), _own_memory_gib())
            now = time.perf_counter()
            result.setdefault("step_seconds", []).append(round(now - self.last, 4))
            result.setdefault("counted", []).append([int(number) for number in counted])
            self.last = now
            if run.seconds is not None and sum(result["step_seconds"][1:]) >= run.seconds:
                control.should_training_stop = True
            if control.should_training_stop or state.global_step >= state.max_steps:
                result["steps"] = state.global_step
                turn.give_back()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                result.setdefault("losses", []).append(round(float(logs["loss"]), 5))

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["evaluate_peak_gib"] = peak()
            self.last = time.perf_counter()

    try:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if run.cap_gib:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(run.cap_gib * GIB / total)
        tuner.run_exp(dict(run.arguments), callbacks=[Watch()])
        result |= {"ok": True, "save_peak_gib": peak()}
        result["peak_gib"] = max(result["step_peaks_gib"] + [result["load_peak_gib"]])
    except torch.cuda.OutOfMemoryError as error:
        result |= {"ok": False, "fault": "out of memory: " + str(error)[:200]}
    except BaseException as error:  # whatever it was, it is this run's result
        result |= {"ok": False, "fault": "".join(traceback.format_exception(error))[-1500:]}
    result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 4)
    return result


def _own_memory_gib() -> float:
    """Main memory of this process without mapped files, page-locked memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 2**20, 2)


def _environment(run: Run, rank: int, port: int) -> dict[str, str]:
    if run.num_gpus == 1 and "deepspeed" not in run.arguments:
        return {"MASTER_PORT": str(port)}
    return measure_ranks.environment(rank, run.num_gpus, port, one_gpu=run.one_gpu)


def _fork(run: Run, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(ROOT / f"{run.name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(run, rank, port))
        (ROOT / f"{run.name}.{rank}.json").write_text(json.dumps(_train(run, rank)))
        status = 0
    finally:
        os._exit(status)


def _outcome(run: Run) -> dict[str, Any]:
    """The row of the fullest GPU, with a fault if any process had one."""
    rows = []
    for rank in range(run.num_gpus):
        file = ROOT / f"{run.name}.{rank}.json"
        rows.append(json.loads(file.read_text()) if file.exists() else {"ok": False, "fault": f"rank {rank} died"})
    faulty = [row for row in rows if not row["ok"]]
    row = faulty[0] if faulty else max(rows, key=lambda row: float(row["peak_gib"]))
    return {"name": run.name} | row | {"host_gib": round(sum(row.get("host_gib", 0) for row in rows), 2)}


def run_all(
    runs: list[Run], *, jobs: int, card_gib: float, done: Callable[[Run, dict[str, Any]], None], deadline: float
) -> list[str]:
    """Runs everything, the largest first, never more at once than the card holds.

    Args:
        runs: What to run.
        jobs: How many at a time.
        card_gib: Memory of the first GPU for all of them together.
        done: Called with every run that ended, and what came out.
        deadline: Seconds after which nothing new begins and what still runs is stopped.

    Returns:
        The names of those that did not get through in time.
    """
    started = time.time()
    todo = sorted(runs, key=lambda run: -run.need_gib)
    running: dict[int, Run] = {}  # by process
    while todo or running:
        late = time.time() - started > deadline
        if late:
            for pid in running:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            return sorted({run.name for run in [*todo, *running.values()]})
        active = {run.name: run for run in running.values()}
        free = card_gib - sum(run.need_gib for run in active.values())
        fitting = next((run for run in todo if run.need_gib <= free or not active), None)
        if fitting is not None and len(active) < jobs:
            todo.remove(fitting)
            port = measure_ranks.free_port()
            for rank in range(fitting.num_gpus):
                (ROOT / f"{fitting.name}.{rank}.json").unlink(missing_ok=True)
                running[_fork(fitting, rank, port)] = fitting
            continue
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.05)
            continue
        run = running.pop(pid)
        siblings = [other for other, its in running.items() if its is run]
        if status or not all(json.loads(file.read_text())["ok"] for file in ROOT.glob(f"{run.name}.?.json")):
            for other in siblings:  # they would wait for it for ever
                os.kill(other, 9)
                os.waitpid(other, 0)
                running.pop(other)
            siblings = []
        if not siblings:
            if not run.keeps_output:
                shutil.rmtree(run.arguments["output_dir"], ignore_errors=True)
            done(run, _outcome(run))
    return []


def prepare(*, deepspeed: bool = False) -> None:
    """Sets the environment and imports or builds what takes long, once for all runs."""
    measure_runs.claim()
    os.environ.update(ENVIRONMENT)
    if deepspeed:
        measure_ranks.build_cpu_adam()
    measure_runs._import_all_but_llamafactory()
