"""A card that a user plans for, by its name or its size."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llamafactory_preflight.device.card import Device, Kind
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.units import GIB, parse_memory


@dataclass(frozen=True, slots=True)
class Card:
    """A card by name.

    Attributes:
        gib: Total memory in GiB as torch reports it, commonly seen; the smaller one where reports differ.
        sold_gb: What it is sold with: the driver keeps some, and error correction takes a sixteenth of GDDR.
        compute_capability: Major and minor, or None.
        kind: What torch would use it as.
    """

    gib: float
    sold_gb: int
    compute_capability: tuple[int, int] | None = None
    kind: Kind = "cuda"


CARDS = {
    "rtx3060": Card(11.8, 12, (8, 6)),
    "rtx4070": Card(11.99, 12, (8, 9)),
    "t4": Card(14.6, 16, (7, 5)),
    "rtx4060ti": Card(15.7, 16, (8, 9)),
    "rtx4080": Card(15.7, 16, (8, 9)),
    "v100": Card(15.8, 16, (7, 0)),
    "a10": Card(22.1, 24, (8, 6)),
    "l4": Card(22.1, 24, (8, 9)),
    "rtx3090": Card(23.6, 24, (8, 6)),
    "rtx4090": Card(23.5, 24, (8, 9)),
    "rtx5090": Card(31.4, 32, (12, 0)),
    "v100-32gb": Card(31.7, 32, (7, 0)),
    "a100-40gb": Card(39.4, 40, (8, 0)),
    "l40s": Card(44.4, 48, (8, 9)),
    "a100": Card(79.1, 80, (8, 0)),
    "h100": Card(79.1, 80, (9, 0)),
    "h200": Card(139.8, 141, (9, 0)),
    "910b": Card(60.9, 64, kind="npu"),
    "mi300x": Card(191.9, 192, kind="rocm"),
}


def planned(*, gpu: str | None, free: str | None = None, where: str = "--gpu") -> Device | None:
    """The card that `--gpu` and `--free` describe, or None where neither is given; `where` names the former.

    Raises:
        UserError: An amount without unit, a card that is not known, or more free than the card has.
    """
    if gpu is None and free is None:
        return None
    card = _card(gpu, where) if gpu is not None else None
    total = card.total_bytes if card is not None else None
    if free is None:
        return card
    usable = parse_memory(free, where="--free")
    if total is not None and usable > total:
        raise UserError(
            phrase("--free {free} is more than --gpu {gpu} has in all", free=free, gpu=gpu),
            next_step="Give less, or leave one out",
        )
    card = card or Device(name=f"{free} free", total_bytes=usable, free_bytes=None, planned=True)
    # `--free` is the allocator's share; the context comes on top of it.
    return replace(card, free_bytes=usable + card.context_bytes)


def sold_alike(device: Device) -> dict[str, int]:
    """Bytes that torch reports, by name, of the cards that are sold with just the size that was planned for."""
    if not device.planned or device.total_bytes is None or device.free_bytes != device.total_bytes:
        return {}
    return {
        name: int(card.gib * GIB)
        for name, card in CARDS.items()
        if card.sold_gb * GIB == device.total_bytes and card.kind == device.kind
    }


def _card(text: str, where: str) -> Device:
    name = re.sub(r"[\s_-]", "", text.lower())
    for maker in ("nvidia", "geforce", "tesla", "amd", "instinct", "ascend"):
        name = name.removeprefix(maker)
    known = {written.replace("-", ""): card for written, card in CARDS.items()}.get(name)
    if known is not None:
        total = int(known.gib * GIB)
    elif text.strip().lstrip("+-.")[:1].isdigit():
        if f"rtx{name}" in CARDS:
            raise UserError(
                phrase("{value} has no unit", value=repr(text)),
                where=where,
                next_step=phrase("Write {number}GiB, or {name} for the card", number=name, name=f"rtx{name}"),
            )
        total = parse_memory(text, where=where)
    else:
        raise UserError(
            phrase("{value} is not a card known here", value=repr(text)),
            where=where,
            next_step=phrase("Give its memory, like 24GiB, or one of {names}", names=", ".join(CARDS)),
        )
    return Device(
        name=text,
        total_bytes=total,
        free_bytes=total,
        compute_capability=known.compute_capability if known else None,
        planned=True,
        kind=known.kind if known else "cuda",
    )
