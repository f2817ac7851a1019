"""CUDA_VISIBLE_DEVICES and its kin, read as the runtimes and torch read them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen(text: str | None, *, count: int, uuids: Sequence[str], prefix: str = "GPU-") -> list[int]:
    """Numbers of the devices that a process sees, in its order.

    What follows an invalid entry is not seen, and a repeated entry hides them all, as in torch/cuda/__init__.py
    (`_parse_visible_devices`, `_transform_uuid_to_ordinals`) and the CUDA programming guide.

    Args:
        text: The variable's value, or None where it is not set.
        count: How many devices there are.
        uuids: Their identifiers in the driver's order; any unambiguous beginning of one may stand in `text`.
        prefix: What an identifier begins with.
    """
    if text is None:
        return list(range(count))
    numbers: list[int] = []
    for item in text.split(","):
        number = _by_uuid(item, uuids) if text.startswith(prefix) else _leading_number(item.strip())
        if number in numbers:
            return []
        if number < 0:
            break
        numbers.append(number)
    beyond = next((place for place, number in enumerate(numbers) if number >= count), len(numbers))
    return numbers[:beyond]


def _leading_number(item: str) -> int:
    """As C's strtoul: `1gpu` is 1; without a number it is -1."""
    match = re.match(r"[+-]?[0-9]{1,9}(?![0-9])", item)
    return int(match.group()) if match else -1


def _by_uuid(item: str, uuids: Sequence[str]) -> int:
    matching = [place for place, uuid in enumerate(uuids) if uuid.startswith(item)] if item else []
    return matching[0] if len(matching) == 1 else -1
