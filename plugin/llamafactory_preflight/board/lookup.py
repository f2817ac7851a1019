"""Finds a model's config.json without keeping the page waiting: what only the hub knows is asked for in a thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model import hub
from llamafactory_preflight.model.hub import ModelSource


LONGEST_WAIT_SECONDS = 8.0  # two requests of at most three seconds each, and the start of a thread
ASK_AGAIN_SECONDS = 60.0  # a hub that could not be reached, and a model that was not there


class StillAsking(Unmodelled):
    """The hub was asked and has not answered yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    answer: Future[ModelSource]
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def is_stale(self) -> bool:
        failed = self.answer.done() and self.answer.exception() is not None
        return failed and time.monotonic() - self.asked_at > ASK_AGAIN_SECONDS


class Lookup:
    """A stand-in for `hub.find` that never waits."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="preflight-hub")
        self._questions: dict[tuple[Any, ...], _Question] = {}

    def find(
        self,
        name: str,
        *,
        revision: str = "main",
        cache_dir: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ModelSource:
        """As `hub.find`, of what is on this machine or was answered before.

        Raises:
            StillAsking: The hub has not answered yet.
            UserError: As `hub.find`.
            Unmodelled: As `hub.find`.
        """
        env = dict(os.environ if environ is None else environ)
        hub_in_use = tuple(env.get(variable) for variable in ("USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB", "HF_ENDPOINT"))
        key = (name, revision, cache_dir, hub_in_use)
        question = self._questions.get(key)
        if question is None or question.is_stale:
            try:
                return hub.find(name, revision=revision, cache_dir=cache_dir, environ=env, asks=False)
            except Unmodelled:
                asked = self._threads.submit(hub.find, name, revision=revision, cache_dir=cache_dir, environ=env)
                question = self._questions[key] = _Question(answer=asked)
        if not question.answer.done():
            raise StillAsking(f"The hub is asked about {name}")
        return question.answer.result()

    def wait(self, matters: Callable[[], bool] = lambda: True) -> None:
        """Waits until everything that was asked is answered, but not for long, and only while it matters."""
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        pending = [question.answer for question in self._questions.values() if not question.answer.done()]
        while pending and matters() and time.monotonic() < deadline:
            pending = list(wait(pending, timeout=0.1).not_done)
