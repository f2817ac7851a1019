"""Times the steps of one LLaMA-Factory training whose memory is watched in every other block of ten.

usage: python scripts/bench_watch.py [--pairs 12] [--json] [KEY=VALUE ...]

A block with the watch and one without stand side by side in the same run, by turns in either order, so that a machine
that grows slower or faster does so for both; each has one step that logs. On a CUDA card it is LoRA of Qwen3-0.6B with
weights of zeros, whose short batches make the GPU wait for the CPU, else a model of two small layers on the CPU;
LLaMA-Factory's arguments may be added, for longer ones. A second run, which is not timed, counts what makes the
CPU wait for the GPU: by torch's own warnings, and the calls that those leave out. The exit code is 1 if a step without
logging waits more often with the watch, or if the median of the pairs is above 0.5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
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

import measure_runs
import qwen3_shapes


LIMIT = 0.005
BLOCK = 10
"""Steps, the last of which logs."""
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
        "logging_steps": BLOCK,
        "gradient_accumulation_steps": 1,
    }
    return measure_runs.arguments({"id": name, "model": name, "args": size | settings | added})


def is_watched(step: int) -> bool:
    """Whether a step, counted from 1, belongs to a block with the watch: with, without, without, with, and so on."""
    return (step - 1) // BLOCK % 4 in (0, 3)


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
            elif state.global_step and state.global_step % (2 * BLOCK) == 0:
                first, second = (statistics.median(block) for block in blocks(steps_of(began[-2 * BLOCK - 1 :])))
                said = f"{state.global_step} of {state.max_steps} steps, the last two blocks"
                print(f"{said}: {first * 1000:.2f} and {second * 1000:.2f} ms a step", file=sys.stderr, flush=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(time.perf_counter())
            if count is not None:
                count.step = 0

    callbacks.append(Clock())
    shutil.rmtree(given["output_dir"], ignore_errors=True)
    with count.counting() if count is not None else contextlib.nullcontext():
        tuner.run_exp(dict(given), callbacks=callbacks)
    taken = json.loads((Path(given["output_dir"]) / "preflight.json").read_text())["ranks"][0]["watch_seconds"]
    return steps_of(began), taken


def steps_of(began: list[float]) -> list[float]:
    """Seconds from each begin to the next."""
    return [later - earlier for earlier, later in itertools.pairwise(began)]


def blocks(seconds: list[float]) -> list[list[float]]:
    """The steps by block."""
    return [seconds[start : start + BLOCK] for start in range(0, len(seconds), BLOCK)]


def compared(seconds: list[float], watch_seconds: float) -> dict[str, Any]:
    """The figures of the pairs of blocks; the first pair warms up."""
    pairs = [
        (first, second) if is_watched(BLOCK * number + 1) else (second, first)
        for number, (first, second) in enumerate(itertools.pairwise(blocks(seconds)))
        if number % 2 == 0 and number
    ]

    def difference(middle: Callable[[list[float]], float]) -> dict[str, float]:
        each = [middle(watched) / middle(alone) - 1 for watched, alone in pairs]
        return {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}

    step = statistics.median(statistics.median(alone) for _, alone in pairs)
    return {
        "pairs": len(pairs),
        "step_seconds": step,
        "difference_of_medians": difference(statistics.median),
        "difference_of_means": difference(statistics.mean),
        "own_clock": watch_seconds / (len(seconds) / 2) / step,
    }


def waiting(waits: dict[int, int], steps: int) -> dict[str, dict[str, float]]:
    """Synchronizations a step that logs and of others; the first two blocks and the last step are left out."""
    figures: dict[str, dict[str, float]] = {}
    for name, logs in (("logged", True), ("other", False)):
        chosen = [step for step in range(2 * BLOCK + 1, steps) if (step % BLOCK == 0) is logs]
        figures[name] = {
            arm: statistics.mean(waits.get(step, 0) for step in chosen if is_watched(step) is watched)
            for arm, watched in (("without", False), ("with", True))
        }
    return figures


def told(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"step {result['step_seconds'] * 1000:.2f} ms, {result['pairs']} pairs of {BLOCK} steps"]
    for name, words in (("difference_of_medians", "median step"), ("difference_of_means", "mean step")):
        seen = result[name]
        lines.append(
            f"{words}: {seen['median']:+.2%} (median of the pairs; {seen['lowest']:+.2%} to {seen['highest']:+.2%})"
        )
    lines.append(f"the watch's own clock: {result['own_clock']:.3%} of a step")
    for name, seen in result["waits"].items():
        lines.append(f"waits for the GPU, {name} steps: {seen['without']:.2f} without, {seen['with']:.2f} with")
    return "\n".join(lines if result["waits"] else [*lines, "waits for the GPU were not counted"])


def main() -> int:
    """Runs all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks that are timed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only-time", action="store_true", help="leave out the run that counts waits")
    parser.add_argument("added", nargs="*", metavar="KEY=VALUE", help="arguments of LLaMA-Factory")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("it takes a pair")
    if not all("=" in one for one in options.added):
        parser.error(f"write arguments as KEY=VALUE, not {' '.join(options.added)}")
    added = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in options.added)}
    os.environ.update({name: value for name, value in measure_runs.ENVIRONMENT.items() if "PREFLIGHT" not in name})
    os.environ |= {"LLAMAFACTORY_TEMPLATE": "off", "LLAMAFACTORY_PREFLIGHT": "warn"}
    with contextlib.suppress(ImportError):
        sys.path.append(str(Path(__file__).resolve().parents[1] / "plugin"))  # where the package is not installed
        from llamafactory_preflight import _startup

        _startup.install()
    import torch

    on_gpu = torch.cuda.is_available()
    steps = 2 * BLOCK * (options.pairs + 1)
    result = compared(*trained(arguments(added, steps=steps, on_gpu=on_gpu))) | {"waits": {}}
    if on_gpu and not options.only_time:
        count, few = Count(), 6 * BLOCK
        trained(arguments(added, steps=few, on_gpu=True), count=count)
        result["waits"] = waiting(count.by_step, few)
    print(json.dumps(result) if options.json else told(result), flush=True)
    others = result["waits"].get("other", {"with": 0, "without": 0})
    return int(others["with"] > others["without"] or result["difference_of_medians"]["median"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
