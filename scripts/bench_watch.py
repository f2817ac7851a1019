"""Times the steps of one LLaMA-Factory training whose memory is watched in every other step.

usage: python scripts/bench_watch.py [--steps 260] [--only-time] [--json] [KEY=VALUE ...]

Of four steps in a row the first and the last are watched, so that a machine that grows slower or faster does so for
both; a step that logs is compared with the ones before and after it that log. On a CUDA card it is LoRA of Qwen3-0.6B
with weights of zeros, whose short batches make the GPU wait for the CPU, else a model of two small layers on the CPU;
LLaMA-Factory's arguments may be added, for longer ones. A second run, which is not timed, counts what makes the CPU
wait for the GPU: by torch's own warnings, and the calls that those leave out. The exit code is 1 if a step without
logging waits more often with the watch, or if the watch costs more than 0.5 % of the steps' time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import command_line
import measure_runs
import qwen3_shapes


OURS = ("model_name_or_path", "dataset", "dataset_dir", "output_dir", "max_steps", "logging_steps")
"""What the comparison itself decides; what it trains is written to a folder of its own and deleted."""
LIMIT = 0.005
LOGS = 10
"""Every so many steps one logs; of two in a row one is watched."""
WARM_UP = 20
SYNC_WARNING = "called a synchronizing CUDA operation"
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 32, "intermediate_size": 256, "vocab_size": 2048, "max_window_layers": 2}


class Count:
    """Counts what waits for the GPU, by the step under way."""

    def __init__(self) -> None:
        self.step = 0
        self.by_step: dict[int, int] = {}

    def add(self, *_: Any, **__: Any) -> None:
        """One more."""
        self.by_step[self.step] = self.by_step.get(self.step, 0) + 1

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Listens to torch's warnings, and to the calls that it does not warn of."""
        import torch

        def warned(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if SYNC_WARNING in str(message):
                self.add()

        unwarned = [(torch.cuda, "synchronize"), (torch.cuda, "mem_get_info"), (torch.cuda, "empty_cache")]
        unwarned += [(torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = warned
            for owner, name in unwarned:
                original = getattr(owner, name)
                setattr(owner, name, self._counted(original))
                stack.callback(setattr, owner, name, original)
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            yield

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.add()
            return original(*args, **kwargs)

        return counted


def arguments(added: dict[str, Any], *, steps: int, on_gpu: bool) -> dict[str, Any]:
    """LLaMA-Factory's arguments of the run; the model is written first."""
    config = qwen3_shapes.config("Qwen/Qwen3-0.6B")
    name = "bench_gpu" if on_gpu else "bench_cpu"
    measure_runs.write_model(name, config if on_gpu else config | SMALL)
    size = {"per_device_train_batch_size": 4} if on_gpu else {"use_cpu": True}
    settings = {
        "cutoff_len": 512,
        "max_steps": steps,
        "logging_steps": LOGS,
        "gradient_accumulation_steps": 1,
    }
    return measure_runs.arguments({"id": name, "model": name, "args": size | settings | added})


def is_watched(step: int) -> bool:
    """Whether a step, counted from 1, is watched: yes, no, no, yes, and so on."""
    return (step - 1) % 4 in (0, 3)


def trained(given: dict[str, Any], *, count: Count | None = None) -> tuple[list[float], float]:
    """Runs it in this process: seconds of each step, from its begin to the next one's, and what the watch took."""
    from llamafactory.train import tuner
    from transformers import TrainerCallback

    from llamafactory_preflight.watch.callback import MemoryWatch

    began: list[float] = []
    callbacks: list[Any] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (watch,) = (callback for callback in callbacks if isinstance(callback, MemoryWatch))
            watch.is_broken = not is_watched(state.global_step + 1)
            began.append(time.perf_counter())
            if count is not None:
                count.step = state.global_step + 1
            elif state.global_step and state.global_step % WARM_UP == 0:
                seconds = (began[-1] - began[-WARM_UP - 1]) / WARM_UP
                print(f"{state.global_step} of {state.max_steps} steps, {seconds * 1000:.1f} ms each", file=sys.stderr)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(time.perf_counter())
            if count is not None:
                count.step = 0

    callbacks.append(Clock())
    shutil.rmtree(given["output_dir"], ignore_errors=True)
    with count.counting() if count is not None else contextlib.nullcontext():
        tuner.run_exp(dict(given), callbacks=callbacks)
    taken = json.loads((Path(given["output_dir"]) / "preflight.json").read_text())["ranks"][0]["watch_seconds"]
    return [later - earlier for earlier, later in itertools.pairwise(began)], taken


def compared(seconds: list[float], watch_seconds: float) -> dict[str, Any]:
    """What the watch adds to a step, as a share of it; the first steps warm up.

    Args:
        seconds: Of each step.
        watch_seconds: What the watch's own clock counted in all of them.

    Returns:
        The median of both kinds of steps together and, of each kind, the median of its comparisons with the interval
        that holds the true median in 95 of 100 cases (by ranks, whatever the distribution).
    """
    differences, logged = [], []
    for begin in range(WARM_UP + 1, len(seconds) - 2, 4):
        four = range(begin, begin + 4)
        if any(step % LOGS == 0 for step in four):
            continue
        sums = {arm: sum(seconds[step - 1] for step in four if is_watched(step) is arm) for arm in (True, False)}
        differences.append(sums[True] / sums[False] - 1)
    for step in range(WARM_UP + LOGS, len(seconds) - LOGS, LOGS):
        if is_watched(step):
            logged.append(2 * seconds[step - 1] / (seconds[step - LOGS - 1] + seconds[step + LOGS - 1]) - 1)
    figures = {"other": between(differences), "logged": between(logged)}
    step_seconds = statistics.median(seconds[WARM_UP:])
    share = sum(size * figures[name]["median"] for name, size in (("other", 1 - 1 / LOGS), ("logged", 1 / LOGS)))
    own = watch_seconds / (len(seconds) / 2) / step_seconds
    return {"step_seconds": step_seconds, "difference": share, **figures, "own_clock": own}


def between(values: list[float]) -> dict[str, float]:
    """The median and the values at the ranks between which it lies in 95 of 100 cases."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = max(0, math.floor(len(ordered) / 2 - half)), min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return {"count": len(ordered), "median": statistics.median(ordered), "low": ordered[low], "high": ordered[high]}


def waiting(waits: dict[int, int], steps: int) -> dict[str, dict[str, float]]:
    """Synchronizations a step that logs and of others; the first steps and the last one are left out."""
    figures: dict[str, dict[str, float]] = {}
    for name, logs in (("logged", True), ("other", False)):
        chosen = [step for step in range(WARM_UP + 1, steps) if (step % LOGS == 0) is logs]
        figures[name] = {
            arm: statistics.mean(waits.get(step, 0) for step in chosen if is_watched(step) is watched)
            for arm, watched in (("without", False), ("with", True))
        }
    return figures


def told(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"a step takes {result['step_seconds'] * 1000:.2f} ms, the watch {result['difference']:+.2%} of it",
    ]
    for name, words in (("other", "steps without logging"), ("logged", "steps that log")):
        seen = result[name]
        span = f"{seen['low']:+.2%} to {seen['high']:+.2%} at 95 %"
        lines.append(f"  {words}: {seen['median']:+.2%} ({span}, {seen['count']} comparisons)")
    lines.append(f"  by the watch's own clock: {result['own_clock']:.3%}")
    for name, seen in result["waits"].items():
        lines.append(f"waits for the GPU, {name} steps: {seen['without']:.2f} without, {seen['with']:.2f} with")
    return "\n".join(lines if result["waits"] else [*lines, "waits for the GPU were not counted"])


def read_added(items: list[str]) -> dict[str, Any]:
    """KEY=VALUE as YAML reads the values."""
    try:
        added = {key: yaml.safe_load(value) for key, equals, value in (one.partition("=") for one in items) if equals}
    except yaml.YAMLError as error:
        command_line.fail(f"a value is not YAML: {' '.join(str(error).split())}")
    if len(added) < len(items):
        command_line.fail(f"write each argument once and as KEY=VALUE, not {' '.join(items)}")
    return added


def refuse(added: dict[str, Any]) -> None:
    """Ends with one message where LLaMA-Factory does not take an argument, or the comparison sets it itself."""
    from llamafactory_preflight.arguments import schema

    mine = [key for key in added if key in OURS]
    if mine:
        command_line.fail(f"`{mine[0]}` is set by the comparison itself (so are {', '.join(OURS)}): leave it out")
    known = schema.load()
    for _, problem in known.problems(added, allow_extra=False) if known else ():
        command_line.fail(str(problem))


def main() -> int:
    """Runs all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=260, help="how many are timed, the first ones included")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only-time", action="store_true", help="leave out the run that counts waits")
    parser.add_argument("added", nargs="*", metavar="KEY=VALUE", help="arguments of LLaMA-Factory")
    options = parser.parse_args()
    if options.steps < 3 * WARM_UP:
        parser.error(f"it takes at least {3 * WARM_UP} steps")
    added = read_added(options.added)
    os.environ.update({name: value for name, value in measure_runs.ENVIRONMENT.items() if "PREFLIGHT" not in name})
    os.environ |= {"LLAMAFACTORY_TEMPLATE": "off", "LLAMAFACTORY_PREFLIGHT": "warn"}
    with contextlib.suppress(ImportError):
        sys.path.append(str(Path(__file__).resolve().parents[1] / "plugin"))  # where the package is not installed
        from llamafactory_preflight import _startup

        _startup.install()
    refuse(added)
    measure_runs.claim()
    import torch

    on_gpu = torch.cuda.is_available()
    result = compared(*trained(arguments(added, steps=options.steps, on_gpu=on_gpu))) | {"waits": {}}
    if on_gpu and not options.only_time:
        count, few = Count(), 3 * WARM_UP
        trained(arguments(added, steps=few, on_gpu=True), count=count)
        result["waits"] = waiting(count.by_step, few)
    print(json.dumps(result) if options.json else told(result), flush=True)
    others = result["waits"].get("other", {"with": 0, "without": 0})
    return int(others["with"] > others["without"] or result["difference"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
