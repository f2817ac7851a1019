"""A micro-step that is followed once and then repeated: only what hooks on modules do differs the next time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.memory.paper.ledger import Booking, Ledger
from llamafactory_preflight.memory.paper.module_hooks import Key, Modules


Passed = tuple[list[Booking], Callable[..., None], tuple[Any, ...]]
"""What was booked since the hook before, a hook, and its arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a model books between the hooks on its modules, and those hooks, in order."""

    hooks: list[Passed]
    last: list[Booking]

    def repeat(self, ledger: Ledger) -> None:
        """Books the same again, while the hooks do what they now do."""
        for bookings, hook, arguments in self.hooks:
            if bookings:
                ledger.book(bookings)
            hook(*arguments)
        ledger.book(self.last)


class Recorder:
    """Notes what is booked from one hook on a module to the next, of one model or of several.

    Args:
        ledger: Books every byte; what hooks book themselves is left out.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._hooks: list[Passed] = []
        ledger.bookings = []

    def watch(self, modules: Modules) -> Modules:
        """The hooks on a model's modules, which are noted as they run."""
        return _Watched(self, modules)

    def finish(self) -> Recording:
        """The recording, when the micro-step is over and all that it held is gone."""
        return Recording(hooks=self._hooks, last=self._taken())

    def pass_on(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Runs a hook."""
        self._hooks.append((self._taken(), hook, arguments))
        hook(*arguments)
        self._ledger.bookings = []

    def _taken(self) -> list[Booking]:
        bookings, self._ledger.bookings = self._ledger.bookings, None
        assert bookings is not None
        return bookings


class _Watched:
    """Stands between a model and the hooks on its modules."""

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        self._recorder, self._modules = recorder, modules

    def begin_forward(self) -> None:
        self._recorder.pass_on(self._modules.begin_forward)

    def enter(self, module: str, key: Key) -> None:
        self._recorder.pass_on(self._modules.enter, module, key)

    def leave(self, module: str, key: Key) -> None:
        self._recorder.pass_on(self._modules.leave, module, key)

    def enter_container(self) -> None:
        self._recorder.pass_on(self._modules.enter_container)

    def borrow(self, key: Key) -> None:
        self._recorder.pass_on(self._modules.borrow, key)

    def hold(self, key: Key) -> None:
        self._recorder.pass_on(self._modules.hold, key)

    def let_go(self, key: Key) -> None:
        self._recorder.pass_on(self._modules.let_go, key)
