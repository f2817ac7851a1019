"""A micro-step that is followed once and then repeated: only what hooks on modules do differs the next time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.memory.module_hooks import Key, Modules
from llamafactory_preflight.memory.paper import Booking, Ledger


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
    """Stands between a model and the hooks on its modules, and notes what is booked from one hook to the next.

    Args:
        ledger: Books every byte.
        modules: The hooks; what they book themselves is left out.
    """

    def __init__(self, ledger: Ledger, modules: Modules) -> None:
        self._ledger, self._modules = ledger, modules
        self._hooks: list[Passed] = []
        ledger.bookings = []

    def enter(self, module: str, key: Key) -> None:
        """As `Modules` says."""
        self._pass(self._modules.enter, module, key)

    def leave(self, module: str, key: Key) -> None:
        """As `Modules` says."""
        self._pass(self._modules.leave, module, key)

    def enter_container(self) -> None:
        """As `Modules` says."""
        self._pass(self._modules.enter_container)

    def borrow(self, key: Key) -> None:
        """As `Modules` says."""
        self._pass(self._modules.borrow, key)

    def hold(self, key: Key) -> None:
        """As `Modules` says."""
        self._pass(self._modules.hold, key)

    def let_go(self, key: Key) -> None:
        """As `Modules` says."""
        self._pass(self._modules.let_go, key)

    def finish(self) -> Recording:
        """The recording, when the micro-step is over and all that it held is gone."""
        return Recording(hooks=self._hooks, last=self._taken())

    def _pass(self, hook: Callable[..., None], *arguments: Any) -> None:
        self._hooks.append((self._taken(), hook, arguments))
        hook(*arguments)
        self._ledger.bookings = []

    def _taken(self) -> list[Booking]:
        bookings, self._ledger.bookings = self._ledger.bookings, None
        assert bookings is not None
        return bookings
