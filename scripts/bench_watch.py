"""Times the steps of one LLaMA-Factory training with the watch on memory and without it, in pairs.

usage: python scripts/bench_watch.py [--pairs 7] [--steps 60] [--json]

The same run is repeated in one process, by turns with LLAMAFACTORY_PREFLIGHT=off and =warn; every other pair begins
with the other. On a CUDA card it is LoRA of Qwen3-0.6B with weights of zeros, else a model of two small layers on the
CPU, whose noise is many times the cost of the watch. A last pair, which is not timed, counts what makes the CPU wait
for the GPU: by torch's own warnings, and the calls that those leave out. The exit code is 1 if a step without logging
waits more often with the watch, or if the median of the pairs is above 0.5 %.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure_runs
import qwen3_shapes


LIMIT = 0.005
LOGGING_STEPS = 10
WARM_STEPS = 5
SYNC_WARNING = "called a synchronizing CUDA operation"
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 32, "intermediate_size": 256, "vocab_size": 2048, "max_window_layers": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One run.

    Attributes:
        seconds: Of each step, from its begin to the next one's; the first few are left out.
        watch_seconds: What the watch itself says it took in the training loop, or None without it.
        waits: Synchronizations of each step by its number, as far as they were counted.
    """

    seconds: list[float]
    watch_seconds: float | None
    waits: dict[int, int]


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


def arguments(*, steps: int, on_gpu: bool) -> dict[str, Any]:
    """LLaMA-Factory's arguments of the run; the model is written first."""
    config = qwen3_shapes.config("Qwen/Qwen3-0.6B")
    name = "bench_gpu" if on_gpu else "bench_cpu"
    measure_runs.write_model(name, config if on_gpu else config | SMALL)
    size = {"per_device_train_batch_size": 4} if on_gpu else {"use_cpu": True}
    settings = {
        "cutoff_len": 512,
        "max_steps": steps,
        "logging_steps": LOGGING_STEPS,
        "gradient_accumulation_steps": 1,
    }
    return measure_runs.arguments({"id": name, "model": name, "args": size | settings})


def trained(given: dict[str, Any], *, watched: bool, counts: bool = False) -> Timed:
    """Runs it once in this process."""
    from llamafactory.train import tuner
    from transformers import TrainerCallback

    began: list[float] = []
    count = Count()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(time.perf_counter())
            count.step = state.global_step + 1

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            count.step = 0

    os.environ["LLAMAFACTORY_PREFLIGHT"] = "warn" if watched else "off"
    record = Path(given["output_dir"]) / "preflight.json"
    shutil.rmtree(record.parent, ignore_errors=True)
    with count.counting() if counts else contextlib.nullcontext():
        tuner.run_exp(dict(given), callbacks=[Clock()])
    if watched != record.is_file():
        raise RuntimeError("the watch was " + ("not there" if watched else "there, although it was switched off"))
    taken = json.loads(record.read_text())["ranks"][0]["watch_seconds"] if watched else None
    seconds = [later - earlier for earlier, later in itertools.pairwise(began)][WARM_STEPS:]
    return Timed(seconds=seconds, watch_seconds=taken, waits={s: n for s, n in count.by_step.items() if s > 0})


def compared(pairs: list[tuple[Timed, Timed]], steps: int) -> dict[str, Any]:
    """The figures of timed pairs, each without the watch and with it."""

    def difference(middle: Callable[[list[float]], float]) -> dict[str, float]:
        each = [middle(watched.seconds) / middle(alone.seconds) - 1 for alone, watched in pairs]
        return {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}

    own = [(watched.watch_seconds or 0) / steps / statistics.median(watched.seconds) for _, watched in pairs]
    return {
        "pairs": len(pairs),
        "step_seconds": statistics.median(statistics.median(alone.seconds) for alone, _ in pairs),
        "difference_of_medians": difference(statistics.median),
        "difference_of_means": difference(statistics.mean),
        "own_clock": statistics.median(own),
    }


def waiting(alone: Timed, watched: Timed, steps: int) -> dict[str, dict[str, float]]:
    """Synchronizations a step, of those that log and of the others; the first ones and the last are left out."""
    figures: dict[str, dict[str, float]] = {}
    for name, logs in (("logged", True), ("other", False)):
        chosen = [step for step in range(WARM_STEPS + 1, steps) if (step % LOGGING_STEPS == 0) is logs]
        figures[name] = {
            arm: statistics.mean(run.waits.get(step, 0) for step in chosen)
            for arm, run in (("without", alone), ("with", watched))
        }
    return figures


def told(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"step {result['step_seconds'] * 1000:.2f} ms, {result['pairs']} pairs"]
    for name, words in (("difference_of_medians", "median step"), ("difference_of_means", "mean step")):
        seen = result[name]
        lines.append(
            f"{words}: {seen['median']:+.2%} (median of the pairs; {seen['lowest']:+.2%} to {seen['highest']:+.2%})"
        )
    lines.append(f"the watch's own clock: {result['own_clock']:.3%} of a step")
    for name, seen in result["waits"].items():
        lines.append(f"waits for the GPU, {name} steps: {seen['without']:.2f} without, {seen['with']:.2f} with")
    return "\n".join(lines if result["waits"] else [*lines, "no CUDA card here, so nothing waits for one"])


def main() -> int:
    """Runs all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 2 * LOGGING_STEPS:
        parser.error(f"it takes a pair and {2 * LOGGING_STEPS} steps")
    os.environ.update({name: value for name, value in measure_runs.ENVIRONMENT.items() if "PREFLIGHT" not in name})
    os.environ["LLAMAFACTORY_TEMPLATE"] = "off"
    with contextlib.suppress(ImportError):
        sys.path.append(str(Path(__file__).resolve().parents[1] / "plugin"))  # where the package is not installed
        from llamafactory_preflight import _startup

        _startup.install()
    import torch

    on_gpu = torch.cuda.is_available()
    given = arguments(steps=options.steps, on_gpu=on_gpu)
    run = functools.partial(trained, given)
    for watched in (False, True):
        run(watched=watched)  # caches, clocks and kernels
    pairs = []
    for number in range(options.pairs):
        pair = {watched: run(watched=watched) for watched in ((False, True) if number % 2 else (True, False))}
        pairs.append((pair[False], pair[True]))
    result = compared(pairs, options.steps) | {"waits": {}}
    if on_gpu:
        result["waits"] = waiting(*(run(watched=watched, counts=True) for watched in (False, True)), options.steps)
    print(json.dumps(result) if options.json else told(result), flush=True)
    waits_more = on_gpu and result["waits"]["other"]["with"] > result["waits"]["other"]["without"]
    return int(waits_more or result["difference_of_medians"]["median"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
