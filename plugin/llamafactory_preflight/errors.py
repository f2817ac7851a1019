"""The one exception type that reaches a user: what is wrong, where, and the next step."""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.phrases import Phrase, joined, phrase


class UserError(ValueError):
    """A mistake in the user's input, told in one message.

    Args:
        what: The fault, as a full sentence without a final period.
        where: File, key and value it was found at, or an empty string.
        next_step: What to do about it, or an empty string.
        parts: The mistakes that `what` announces; `where` and `next_step` are theirs then.

    Attributes:
        text: All of it in one message.
    """

    def __init__(self, what: str, *, where: str = "", next_step: str = "", parts: Sequence[UserError] = ()) -> None:
        self.what, self.where, self.next_step = what, where, next_step
        self.text = _listed(what, parts) if parts else _sentences(what, where, next_step)
        super().__init__(self.text)


class Refused(UserError):
    """A mistake that LLaMA-Factory cannot get past either, so that `train` ends with this message at once."""


def _sentences(what: str, where: str, next_step: str) -> Phrase:
    fault = phrase("{sentence}.", sentence=phrase("{what} ({where})", what=what, where=where) if where else what)
    return joined(" ", (fault, phrase("{sentence}.", sentence=next_step))) if next_step else fault


def _listed(what: str, parts: Sequence[UserError]) -> Phrase:
    lines = joined("", (phrase("\n  - {part}", part=part.text) for part in parts))
    return phrase("{what}:{lines}", what=what, lines=lines)


def words(error: Exception) -> str:
    """What an exception says, on one line; of the system's errors without number and path."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())


class Unmodelled(Exception):
    """A run that is legal but that no formula here covers; the verdict is then `unknown`.

    Args:
        reason: What is not covered, as a full sentence without a final period.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
