"""Sentences that remember what they were made of, so that they can be said in another language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


_PLACE = re.compile(r"\{(\w+)\}")


class Phrase(str):
    """An English sentence, with the pattern that it was made from and what was put into it.

    A plain string is its own pattern. Values may be phrases again.
    """

    pattern: str
    values: Mapping[str, object]


def phrase(pattern: str, /, **values: object) -> Phrase:
    """Makes a sentence; a `{name}` without a value stays, for an amount that the report puts there."""
    made = Phrase(filled(pattern, values))
    made.pattern, made.values = pattern, values
    return made


def joined(separator: str, parts: Iterable[str]) -> Phrase:
    """Several sentences as one; `separator.join` would forget what they were made of."""
    values = {f"part{number}": part for number, part in enumerate(parts)}
    return phrase(separator.join(f"{{{name}}}" for name in values), **values)


def filled(pattern: str, values: Mapping[str, object]) -> str:
    """The pattern with its values; braces in a value are left as they are."""
    return _PLACE.sub(lambda place: str(values.get(place.group(1), place.group(0))), pattern)
