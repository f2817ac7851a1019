"""The callback that measures. It reads counters that the allocator keeps anyway, and never waits for the GPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback

from llamafactory_preflight import handoff
from llamafactory_preflight.settings import Settings
from llamafactory_preflight.units import gib
from llamafactory_preflight.watch import trainer_log
from llamafactory_preflight.watch.counters import Counters, counters, host_peak_bytes
from llamafactory_preflight.watch.snapshot import FOLDER, StepSnapshot
from llamafactory_preflight.watch.state import Batch, State


_F = TypeVar("_F", bound=Callable[..., Any])
LOG = "log"


def _timed(method: _F) -> _F:
    """Counts the time that watching takes, and stops watching where it fails: training goes on."""

    @functools.wraps(method)
    def timed(self: MemoryWatch, *args: Any, **kwargs: Any) -> None:
        if self.is_broken:
            return
        began, recording = time.perf_counter(), self._recording_seconds
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.is_broken = True
            handoff.warn_once(f"memory is no longer watched ({type(error).__name__}: {error})")
        if self.state.step:  # what comes before the first step is done once
            self.state.watch_seconds += time.perf_counter() - began - (self._recording_seconds - recording)

    return timed  # type: ignore[return-value]


class MemoryWatch(TrainerCallback):
    """Measures memory by phase and adds it to what the Trainer logs.

    Args:
        state: What to fill; the heartbeat reads it from another thread.
        expected_bytes: Asked when the model is loaded: the predicted upper bound of the peak, or None.
        beside: The other callbacks of the run, once they are there.
    """

    def __init__(self, state: State, *, expected_bytes: Callable[[], int | None], beside: list[Any]) -> None:
        self.state = state
        self.is_broken = False
        self._expected_bytes, self._beside = expected_bytes, beside
        self._counters: Counters | None = None
        self._hook: Any = None
        self._log: Callable[..., None] | None = None
        self._snapshot: StepSnapshot | None = None
        self._recording_seconds = 0.0

    @_timed
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is made, so the weights are loaded."""
        self._prepare(args)

    def _prepare(self, args: Any) -> None:
        self._counters = counters(device_type=args.device.type, other_reader=not args.skip_memory_metrics)
        self.state.on_gpu = self._counters.on_gpu
        self.state.expected_bytes = self._expected_bytes()
        self.state.phase = "load"
        trainer_log.attach(self._beside)

    @_timed
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All is in place for the first step."""
        if self._counters is None:  # PPO's own loop tells of no earlier event
            self._prepare(args)
        self.state.held_bytes["load"] = self._enter("forward_backward")
        self._hook = kwargs["model"].register_forward_pre_hook(self._on_forward, with_kwargs=True)
        self._log_with_memory()
        step = Settings.from_environment().snapshot
        if step is not None and self.state.on_gpu:
            self._snapshot = StepSnapshot(step, Path(args.output_dir) / FOLDER / f"rank_{self.state.rank}")
        elif step is not None:
            handoff.warn_once("no memory snapshot: torch records CUDA memory only")

    @_timed
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first micro-batch of a step."""
        self.state.step = state.global_step + 1
        if self.state.phase != "forward_backward":
            self._enter("forward_backward")
        with self._recorded() as snapshot:
            if snapshot is not None:
                snapshot.begin(kwargs["model"])

    @_timed
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are clipped."""
        self._enter("optimizer_step")
        with self._recorded() as snapshot:
            if snapshot is not None:
                snapshot.before_optimizer()

    @_timed
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights are updated."""
        with self._recorded() as snapshot:
            if snapshot is not None:
                snapshot.after_optimizer(kwargs.get("optimizer"))

    @_timed
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are gone again; what comes next stands in `control`, which the default callback has set."""
        self.state.held_bytes["steps"] = self._enter(
            "evaluate" if control.should_evaluate else "save" if control.should_save else "forward_backward"
        )
        with self._recorded() as snapshot:
            if snapshot is not None:
                self._snapshot = None
                size = self.state.longest.size if self.state.longest is not None else 0
                vocabulary = getattr(kwargs["model"].config, "vocab_size", 0) or 0
                snapshot.end(logits_bytes=2 * size * vocabulary)

    @_timed
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch of an evaluation or a prediction is done."""
        if self.state.phase != "evaluate":
            self._enter("evaluate", seen="evaluate")

    @_timed
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation is done."""
        self._enter("save" if control.should_save else "forward_backward", seen="evaluate")

    @_timed
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """A prediction is done."""
        self._enter("save", seen="evaluate")

    @_timed
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is written."""
        self._enter("forward_backward", seen="save")

    @_timed
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is done; the model will be saved."""
        if self._snapshot is not None:
            handoff.warn_once(
                f"no memory snapshot: step {self._snapshot.step} did not come, the last was {state.global_step}"
            )
            self._snapshot = None
        self.release()
        self._enter("save")

    def finish(self) -> None:
        """Reads what came after the last event."""
        if self._counters is not None:
            self._enter(self.state.phase)
        self.state.host_peak_bytes = max(self.state.host_peak_bytes, host_peak_bytes())

    def release(self) -> None:
        """Takes back what was hung into the model and the Trainer."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._log is not None:
            setattr(Trainer, LOG, self._log)
            self._log = None
        if self._snapshot is not None:
            self._snapshot.stop()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[StepSnapshot | None]:
        """The snapshot where it is of this step. It fails alone, and its time was asked for: it counts apart."""
        snapshot = self._snapshot if self._snapshot is not None and self._snapshot.step == self.state.step else None
        began = time.perf_counter()
        try:
            yield snapshot
        except Exception as error:
            handoff.warn_once(f"no memory snapshot ({type(error).__name__}: {error})")
            self._snapshot = None
            if snapshot is not None:
                snapshot.stop()
        self._recording_seconds += time.perf_counter() - began if snapshot is not None else 0

    def _enter(self, phase: str, *, seen: str | None = None) -> int:
        """Counts the peak to the phase that ends, or to `seen`, and begins the next; returns what is allocated."""
        if self._counters is None:
            return 0
        self.state.phase = seen or self.state.phase
        reading = self._counters.read()
        self.state.note(reading.peak_allocated, reading.peak_reserved)
        self._counters.restart()
        self.state.phase = phase
        return reading.allocated

    @_timed
    def _on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        shape = tuple(getattr(ids, "shape", ()))
        if len(shape) == 2:
            self.state.saw(Batch(sequences=int(shape[0]), tokens=int(shape[1]), step=self.state.step))

    def _log_with_memory(self) -> None:
        """Lets `Trainer.log` tell memory too.

        In `on_log` it would be too late: callbacks that report elsewhere stand before this one.
        """
        original: Callable[..., None] = getattr(Trainer, LOG)
        watch = self

        @functools.wraps(original)
        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                watch.add_to(logs)
            original(trainer, logs, *args, **kwargs)

        setattr(Trainer, LOG, log)
        self._log = original

    @_timed
    def add_to(self, logs: dict[str, float]) -> None:
        """Adds what is in use now and the peak since the start."""
        if self._counters is None:
            return
        reading = self._counters.read()
        self.state.note(reading.peak_allocated, reading.peak_reserved)
        peak = self.state.peak()
        self.state.host_peak_bytes = host_peak_bytes()
        if not self.state.on_gpu:
            logs |= {
                "host_mem_gib": _rounded(reading.allocated),
                "host_mem_peak_gib": _rounded(self.state.host_peak_bytes),
            }
            return
        free = self._counters.free()
        if free is not None:
            least = self.state.least_free_bytes
            self.state.least_free_bytes = free if least is None else min(least, free)
            logs["gpu_mem_free_gib"] = _rounded(free)
        logs |= {
            "gpu_mem_allocated_gib": _rounded(reading.allocated),
            "gpu_mem_reserved_gib": _rounded(reading.reserved),
            "gpu_mem_peak_allocated_gib": _rounded(peak.allocated),
            "gpu_mem_peak_reserved_gib": _rounded(peak.reserved),
        }


def _rounded(size_bytes: int) -> float:
    return round(gib(size_bytes), 3)
