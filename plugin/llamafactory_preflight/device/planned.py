"""A card that a user plans for, by its name or its size."""

from __future__ import annotations

import re

from llamafactory_preflight.device.card import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB, parse_memory


# Total memory as torch reports it, commonly seen values in GiB; the smaller one where reports differ.
CARDS = {
    "rtx3060": 11.8, "rtx4070": 11.99, "t4": 14.6, "rtx4060ti": 15.7, "rtx4080": 15.7, "v100": 15.8, "a10": 22.1,
    "l4": 22.1, "rtx3090": 23.6, "rtx4090": 23.6, "rtx5090": 31.4, "v100-32gb": 31.7, "a100-40gb": 39.4, "l40s": 44.4,
    "a100": 79.1, "h100": 79.1, "h200": 139.8,
}  # fmt: skip


def planned(*, gpu: str | None, free: str | None = None, where: str = "--gpu") -> Device | None:
    """The card that `--gpu` and `--free` describe, or None where neither is given; `where` names the former.

    Raises:
        UserError: An amount without unit, a card that is not known, or more free than the card has.
    """
    if gpu is None and free is None:
        return None
    total = _total(gpu, where) if gpu is not None else None
    if free is None:
        return Device(name=str(gpu), total_bytes=total, free_bytes=total, planned=True)
    usable = parse_memory(free, where="--free")
    if total is not None and usable > total:
        raise UserError(f"--free {free} is more than --gpu {gpu} has in all", next_step="Give less, or leave one out")
    card = Device(name=gpu or f"{free} free", total_bytes=total or usable, free_bytes=None, planned=True)
    # `--free` is the allocator's share; the context comes on top of it.
    return Device(name=card.name, total_bytes=card.total_bytes, free_bytes=usable + card.context_bytes, planned=True)


def _total(text: str, where: str) -> int:
    name = re.sub(r"[\s_-]", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")
    cards = {card.replace("-", ""): size for card, size in CARDS.items()}
    if name in cards:
        return int(cards[name] * GIB)
    if text.strip().lstrip("+-.")[:1].isdigit():
        return parse_memory(text, where=where)
    raise UserError(
        f"{text!r} is not a card known here",
        where=where,
        next_step=f"Give its memory, like 24GiB, or one of {', '.join(CARDS)}",
    )
