"""Amounts of memory as people write them, to bytes; bytes to GiB for reports."""

from __future__ import annotations

import re

from llamafactory_preflight.errors import UserError


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
        raise UserError(f"{text!r} is not an amount of memory", where=where, next_step="Write it like 24GiB")
    number, unit = match.groups()
    if not unit:
        raise UserError(f"{text!r} has no unit", where=where, next_step=f"Write {number}GiB")
    size = int(float(number) * SCALES[unit.lower()])
    if size <= 0:
        raise UserError(f"{text!r} is no memory at all", where=where, next_step="Write it like 24GiB")
    return size


def gib(size_bytes: int) -> float:
    """Bytes in GiB."""
    return size_bytes / GIB
