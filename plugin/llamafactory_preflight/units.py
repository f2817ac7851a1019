"""Amounts of memory as people write them, to bytes; bytes to GiB for reports."""

from __future__ import annotations

import re

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


GIB = 1024**3
MIB = 1024**2
SCALES = {
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
    "m": MIB,
    "mb": MIB,
    "mib": MIB,
    "t": 1024 * GIB,
    "tb": 1024 * GIB,
    "tib": 1024 * GIB,
}


def parse_memory(text: str, *, where: str = "") -> int:
    """Reads `24GiB`, `24GB` or `21.5 GiB`; GB means GiB, as cards are sold.

    Raises:
        UserError: The amount has no unit, or is not an amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in {"", *SCALES}:
        raise UserError(
            phrase("{value} is not an amount of memory", value=repr(text)),
            where=where,
            next_step="Write it like 24GiB",
        )
    number, unit = match.groups()
    if not unit and float(number):
        raise UserError(
            phrase("{value} has no unit", value=repr(text)),
            where=where,
            next_step=phrase("Write {number}GiB", number=number),
        )
    size = int(float(number) * SCALES[unit.lower() or "g"])
    if size <= 0:
        raise UserError(
            phrase("{value} is no memory at all", value=repr(text)), where=where, next_step="Write it like 24GiB"
        )
    return size


def gib(size_bytes: int) -> float:
    """Bytes in GiB."""
    return size_bytes / GIB
