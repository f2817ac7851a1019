"""What the plugin remembers of each browser session; a page that is loaded again is a new one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from llamafactory_preflight.board import fields
from llamafactory_preflight.board.place import Values


MOST_SESSIONS = 256
# Elements whose change makes the board overwrite others: the handler that does so, and what it overwrites.
FOLLOWERS = {
    "get_model_info": (fields.MODEL_NAME, (fields.MODEL_PATH, fields.TEMPLATE)),
    "change_stage": (fields.STAGE, (fields.DATASET, fields.PACKING)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A step that can be undone.

    Attributes:
        before: What every element held.
        after: What every element held after it.
        written: `Session.written` before it.
        unplaced: Arguments that the board could not be told.
    """

    before: Values
    after: Values
    written: frozenset[str]
    unplaced: tuple[str, ...] = ()

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Elements that hold something else, with both values."""
        pairs = {name: (self.before.get(name), value) for name, value in self.after.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(kw_only=True, slots=True)
class View:
    """What the memory panel was asked about, and what came of it. Of two that overlap, each has its own.

    Attributes:
        data: What the page held, by element.
        remedies: What the buttons below the panel set.
        is_unfinished: Whether the hub had not answered, or remedies were not looked for, when the panel was drawn.
    """

    data: Mapping[Any, Any] = field(default_factory=dict)
    remedies: tuple[Mapping[str, Any], ...] = ()
    is_unfinished: bool = False


@dataclass(kw_only=True, slots=True)
class Session:
    """One open page.

    Attributes:
        awaited: What the board's own handlers are to answer: by handler, values that will change and the answers.
        changes: Presets and remedies that were applied, the last one last.
        written: Arguments of the preset that was chosen last; Preview shows those that are false, too.
        chosen: Values that a preset put there, so that they are no choice of the user's.
        asked: The command that would not fit and that the user was asked about.
        view: What the panel was asked about last; the answer to an earlier one is not shown.
    """

    awaited: dict[str, list[tuple[Any, tuple[Any, ...]]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    written: frozenset[str] = frozenset()
    chosen: Values = field(default_factory=dict)
    asked: str = ""
    view: View = field(default_factory=View)

    def expect(self, values: Values, before: Values | None = None) -> None:
        """Notes what the board's handlers shall answer when the browser reports the elements just filled.

        Without `before` it is not known what changes. What is noted in vain does no harm: the next change of that
        element is to another value, and that takes the note away.
        """
        for handler, (driver, followers) in FOLLOWERS.items():
            if driver in values and (before is None or before.get(driver) != values[driver]):
                if all(name in values for name in followers):
                    note = (values[driver], tuple(values[name] for name in followers))
                    others = [other for other in self.awaited.get(handler, []) if other[0] != note[0]]
                    self.awaited[handler] = [*others, note]

    def answer(self, handler: str, value: Any) -> tuple[Any, ...] | None:
        """What was noted for a handler, as long as it is called for a value that was filled in.

        Browsers report one change of a menu twice, and maybe after the next one was filled in.
        """
        notes = self.awaited.pop(handler, [])
        for number, (expected, answer) in enumerate(notes):
            if expected == value:
                self.awaited[handler] = notes[number:]
                return answer
        return None


_sessions: OrderedDict[str, Session] = OrderedDict()
_lock = Lock()


def of(request: Any) -> Session:
    """The session of a request of gradio's; a call that comes without one gets a new session."""
    key = getattr(request, "session_hash", None)
    if key is None:
        return Session()
    with _lock:
        session = _sessions.setdefault(key, Session())
        _sessions.move_to_end(key)
        while len(_sessions) > MOST_SESSIONS:
            _sessions.popitem(last=False)
    return session
