"""Records the memory of one step: torch's snapshot for its viewer, a picture, and a table of the largest blocks."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import torch

from llamafactory_preflight import handoff, report
from llamafactory_preflight.units import GIB
from llamafactory_preflight.watch.blocks import KINDS, Marks, Timeline, timeline


FOLDER = "preflight_snapshot"
MOST_ENTRIES = 1_000_000
NUM_BLOCKS = 20
COLOURS = ("#4c566a", "#81a1c1", "#a3be8c", "#ebcb8b", "#bf616a", "#d08770", "#b48ead")


class StepSnapshot:
    """One step under observation. Recording slows it down, so it is done on request only.

    Args:
        step: Its number, from 1.
        folder: Where to write.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self._folder = step, folder
        self._named: dict[int, tuple[str, str]] = {}
        self._modules: list[tuple[int, str]] = []
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._model: Any = None
        self._optimizer_at = 0

    def begin(self, model: torch.nn.Module) -> None:
        """Before the step."""
        for name, parameter in model.named_parameters():
            kind = "adapters" if "lora_" in name or "oft_" in name else "weights"
            self._named[parameter.data_ptr()] = (kind, name)
        for name, buffer in model.named_buffers():
            self._named[buffer.data_ptr()] = ("weights", name)
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name or "model")))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")
        self._model = model

    def before_optimizer(self) -> None:
        """Gradients are complete."""
        self._optimizer_at = _now()
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._named[parameter.grad.data_ptr()] = ("gradients", name)

    def after_optimizer(self, optimizer: Any) -> None:
        """Its states exist."""
        for state in getattr(optimizer, "state", {}).values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._named[value.data_ptr()] = ("optimizer", name)

    def end(self, *, logits_bytes: int) -> None:
        """After the step: writes everything."""
        taken = torch.cuda.memory._snapshot()
        self.stop()
        marks = Marks(
            named=self._named, modules=self._modules, optimizer_at=self._optimizer_at, logits_bytes=logits_bytes
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        base = self._folder / f"step_{self.step}"
        with open(base.with_suffix(".pickle"), "wb") as file:
            pickle.dump(taken, file)
        seen = timeline(taken, marks, device=torch.cuda.current_device())
        base.with_suffix(".txt").write_text(table(seen), encoding="utf-8")
        picture(seen, base.with_suffix(".png"), title=f"GPU memory of step {self.step}")
        handoff.say(f"snapshot of step {self.step}: {base}.png, .txt, and .pickle for pytorch.org/memory_viz")

    def stop(self) -> None:
        """Records no more, and leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        if self._model is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._handles, self._model = [], None

    def _enter(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._modules.append((_now(), name))

        return enter

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._modules.append((_now(), self._stack[-1] if self._stack else ""))


def table(seen: Timeline) -> str:
    """The largest blocks that were alive at the peak, and the sum of each kind."""
    lines = [f"{'size':>12}  {'kind':<12} {'made by':<60} where"]
    for block in seen.at_peak[:NUM_BLOCKS]:
        lines.append(f"{report.size(block.size):>12}  {block.kind:<12} {block.owner:<60} {block.place}".rstrip())
    lines.append("")
    for kind in KINDS:
        total = sum(block.size for block in seen.at_peak if block.kind == kind)
        lines.append(f"{report.size(total):>12}  {kind}")
    return "\n".join(lines) + "\n"


def picture(seen: Timeline, file: Path, *, title: str) -> None:
    """A stacked area over the step, by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    seconds = [at / 1e6 for at in seen.times]
    columns = [[size / GIB for size in seen.sizes[kind]] for kind in KINDS]
    axes.stackplot(seconds, columns, labels=KINDS, colors=COLOURS, step="post")
    axes.set(xlabel="seconds", ylabel="GiB", title=title)
    axes.margins(x=0)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _now() -> int:
    return time.time_ns() // 1000
