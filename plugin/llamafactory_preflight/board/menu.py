"""What the menus offer: tiers, presets and cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamafactory_preflight import device as cards
from llamafactory_preflight.board.words import say
from llamafactory_preflight.device import Device
from llamafactory_preflight.presets import ANY, Preset
from llamafactory_preflight.units import GIB


LEAST_OF_TIER = 0.9  # a card reports up to a tenth less than it is sold as: an A10 of 24 GB has 22.1 GiB
HERE = "here"
"""Stands for the GPUs of this machine in the menu of cards."""
Choice = tuple[str, str]


def tiers(available: Sequence[Preset]) -> list[Choice]:
    """The tiers that have presets, smaller cards first."""
    names = dict.fromkeys(preset.tier for preset in available)
    return [(name if name != ANY else "CPU / any", name) for name in names]


def suggested(available: Sequence[Preset], devices: Sequence[Device]) -> str:
    """The largest tier that the smallest card found belongs to."""
    total = min((device.total_bytes or 0 for device in devices), default=0)
    fitting = [preset.tier for preset in available if _bytes(preset.tier) * LEAST_OF_TIER <= total]
    return max(fitting, key=_bytes, default=ANY)


def of_tier(available: Sequence[Preset], tier: str | None) -> list[Choice]:
    """The presets of one tier, each with what it trains."""
    return [
        (f"{preset.name}: {_described(preset.arguments)}", preset.name) for preset in available if preset.tier == tier
    ]


def card_choices(lang: str | None = "en") -> list[Choice]:
    """Cards to plan for; the first is this machine."""
    found = _machine(cards.visible())
    here = f"{say('this_machine', lang)} ({found})"
    return [(here, HERE), *((f"{name.upper()} ({size:g} GiB)", name) for name, size in cards.CARDS.items())]


def _machine(devices: Sequence[Device]) -> str:
    """The GPUs of this machine in a few words."""
    names = dict.fromkeys(device.name for device in devices)
    counted = (f"{sum(device.name == name for device in devices)} x {name}" for name in names)
    return ", ".join(counted) or "CPU"


def _bytes(tier: str) -> int:
    return int(tier.split()[0]) * GIB if tier != ANY else 0


def _described(arguments: dict[str, Any]) -> str:
    model = str(arguments.get("model_name_or_path", "")).rpartition("/")[2]
    bits = arguments.get("quantization_bit")
    method = {"lora": "LoRA", "full": "full", "freeze": "freeze"}.get(
        str(arguments.get("finetuning_type", "lora")), "OFT"
    )
    stage = str(arguments.get("stage", "sft"))
    parts = [model, ("Q" if bits else "") + method, *([stage.upper()] if stage != "sft" else [])]
    parts.append(f"{arguments.get('cutoff_len', 2048)} tokens")
    if arguments.get("deepspeed"):
        parts.append(str(arguments["deepspeed"]).rpartition("/")[2].removesuffix(".json"))
    return ", ".join(parts)
