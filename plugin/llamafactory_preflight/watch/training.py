"""Watches one process of a run from its first argument to its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments, guard, handoff
from llamafactory_preflight.data.lengths import Longest
from llamafactory_preflight.result import Result
from llamafactory_preflight.settings import Settings
from llamafactory_preflight.software import Software
from llamafactory_preflight.watch import aftermath, explain, heartbeat, lookalikes, record, shortage, state
from llamafactory_preflight.watch.callback import MemoryWatch
from llamafactory_preflight.watch.counters import host_room_bytes


class Training:
    """One run in this process.

    Args:
        given: LLaMA-Factory's arguments by name.
        callbacks: The list that LLaMA-Factory will put its own into; ours is added.
    """

    def __init__(self, given: Mapping[str, Any], callbacks: list[Any]) -> None:
        self._given = given
        self.state = state.of_rank(os.environ)
        self.output_dir = str(given["output_dir"]) if given.get("output_dir") else None
        self.result: Result | None = None
        self.longest: Longest | None = None
        self.callback = MemoryWatch(self.state, expected_bytes=self._expected_bytes, beside=callbacks)
        callbacks.append(self.callback)
        self._heartbeat = heartbeat.Heartbeat(Path(self.output_dir), self.state) if self.output_dir else None

    @property
    def given(self) -> Mapping[str, Any]:
        """The arguments as LLaMA-Factory has got them in the end."""
        last = handoff.remembered()
        return self._given if last is None else last if isinstance(last, dict) else arguments.read(last)

    def begin(self) -> None:
        """Tells of a run in the same folder that was killed, and begins to write the heartbeat."""
        if self.output_dir is not None and handoff.speaks():
            for text in aftermath.of_killed(self.output_dir):
                handoff.say(text.removeprefix("llamafactory-preflight: "))
            heartbeat.clear(Path(self.output_dir))
        # Where our parent has not looked, the first rank may refuse the run, and torchrun ends the others unheard.
        if handoff.speaks() or handoff.is_checked(self._given):
            self._start_heartbeat()

    def data_is_read(self, longest: Longest | None) -> None:
        """The data is tokenized, so the run was not refused; the weights come next."""
        self.longest, self.state.phase = longest, "load"
        self._start_heartbeat()

    def _start_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.start()

    def finish(self) -> None:
        """The run is over: one line, and `preflight.json`."""
        self.callback.finish()
        mine = self.state.as_dict()
        if not handoff.speaks():
            self._end_heartbeat({"outcome": "finished", "measured": mine})
            return
        self._end_heartbeat(None)
        ranks = [mine]
        if self.output_dir is not None:
            num_others = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
            ranks += aftermath.measured_by_others(self.output_dir, num_others)
            self._write(ranks)
            heartbeat.clear(Path(self.output_dir))
        said = record.line(self.result, ranks)
        if said is not None:
            handoff.say(said)

    def fail(self, error: BaseException) -> None:
        """An exception is on its way out: adds what we know to it, and leaves its type alone."""
        self.callback.release()
        text = None if isinstance(error, (SystemExit, KeyboardInterrupt)) else self._explained(error)
        if text is not None:
            error.add_note(f"\n{text}")
        has_parent = "TORCHELASTIC_RUN_ID" in os.environ
        self._end_heartbeat({"outcome": "failed", "explanation": text} if text and has_parent else None)
        if text is not None and self.output_dir is not None and handoff.speaks():
            self.callback.finish()
            self._write([self.state.as_dict()])

    def _end_heartbeat(self, outcome: Mapping[str, Any] | None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end(outcome)

    def _explained(self, error: BaseException) -> str | None:
        short = shortage.recognized(error)
        if short is None:
            sentence = lookalikes.sentence(shortage.said(error))
            return "\n".join(explain.wrapped(f"llamafactory-preflight: {sentence}")) if sentence else None
        phase = shortage.phase_of(error, self.state.phase)
        length, eval_length = self._length(), self._eval_length()
        if phase == "forward_backward" and self.state.current is not None:
            length = self.state.current.tokens
        if phase == "evaluate" and self.state.current is not None:
            eval_length = self.state.current.tokens
        result = self._looked_at(length, eval_length)
        self.result = self.result or result
        if short.where == "gpu":  # it may have run out before the Trainer was there to tell
            self.state.on_gpu = True
            self.state.peaks.setdefault(phase, state.Peak()).include(short.allocated or 0, short.allocated or 0)
        if short.where != "gpu":
            room, resident = host_room_bytes(), heartbeat.resident_bytes()
            budget = room + resident if room is not None and resident is not None else None
        else:
            room, budget = None, _budget(short, result)
        case = explain.Case(
            shortage=short,
            state=self.state,
            phase=phase,
            result=result,
            budget_bytes=budget,
            room_bytes=room,
            length=length,
            eval_length=eval_length,
            output_dir=self.output_dir,
        )
        return explain.on_gpu(case) if short.where == "gpu" else explain.on_host(case)

    def _expected_bytes(self) -> int | None:
        self.result = self._looked_at(self._length(), self._eval_length())
        if self.result is None or self.result.estimate is None:
            return None
        return self.result.estimate.high_bytes if self.state.on_gpu else None

    def _length(self) -> int | None:
        return self.longest.tokens if self.longest is not None and not self.given.get("packing") else None

    def _eval_length(self) -> int | None:
        return self.longest.eval_tokens if self.longest is not None and not self.given.get("packing") else None

    def _looked_at(self, length: int | None, eval_length: int | None) -> Result | None:
        return guard.looked_at(
            self.given, Settings.from_environment(), stage="process", length=length, eval_length=eval_length
        )

    def _write(self, ranks: list[dict[str, Any]]) -> None:
        assert self.output_dir is not None
        versions = Software.installed().as_dict()
        content = record.content(self.result, self.given, ranks, versions)
        heartbeat.write_json(Path(self.output_dir) / record.FILE, content)


def _budget(short: shortage.Shortage, result: Result | None) -> int | None:
    """What this process could have of the card in all, its CUDA context included."""
    context = result.device.context_bytes if result is not None and result.device is not None else 0
    if short.allowed is not None:
        return short.allowed + context
    if short.own is not None and short.free is not None:
        return short.own + short.free
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() + context
