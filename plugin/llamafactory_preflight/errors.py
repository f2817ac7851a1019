"""The one exception type that reaches a user: what is wrong, where, and the next step."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the user's input, told in one message.

    Args:
        what: The fault, as a full sentence without a final period.
        where: File, key and value it was found at, or an empty string.
        next_step: What to do about it, or an empty string.
    """

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        self.what, self.where, self.next_step = what, where, next_step
        place = f" ({where})" if where else ""
        step = f" {next_step}." if next_step else ""
        super().__init__(f"{what}{place}.{step}")


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
