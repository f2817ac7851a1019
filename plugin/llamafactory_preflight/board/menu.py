"""What the menus offer: tiers, presets and cards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from llamafactory_preflight import device as cards
from llamafactory_preflight.board.words import LANGUAGES, say
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.presets import ANY, Preset
from llamafactory_preflight.settings import Settings


HERE = "here"
"""Stands for the GPUs of this machine in the menu of cards."""
Choice = tuple[str, str]


def tiers(available: Sequence[Preset]) -> list[Choice]:
    """The tiers that have presets, smaller cards first."""
    names = dict.fromkeys(preset.tier for preset in available)
    return [(name if name != ANY else "CPU / any", name) for name in names]


def suggested(available: Sequence[Preset], devices: Sequence[Device]) -> str:
    """The tier of the largest cards, and of the most of them, that the cards found are no smaller than."""
    usable = min(((device.total_bytes or 0) - device.context_bytes for device in devices), default=0)
    fitting = [item for item in available if item.usable_bytes <= usable and item.num_gpus <= max(1, len(devices))]
    return max(fitting, key=lambda preset: (preset.usable_bytes, preset.num_gpus)).tier if fitting else ANY


def of_tier(available: Sequence[Preset], tier: str | None) -> list[Choice]:
    """The presets of one tier, each with what it trains."""
    return [(f"{preset.name}: {_described(preset)}", preset.name) for preset in available if preset.tier == tier]


def card_choices(lang: str | None = "en") -> list[Choice]:
    """Cards to plan for; the first is this machine."""
    found = _machine(here(), lang)
    return [
        (f"{say('this_machine', lang)} ({found})", HERE),
        *((f"{name.upper()} ({card.gib:g} GiB)", name) for name, card in cards.CARDS.items()),
    ]


def card(given: object) -> str:
    """The card that the menu stands for, as `--gpu` takes it; empty for this machine.

    Leaving a menu that takes other values by keyboard makes its value what it showed.
    """
    shown = {label: value for lang in LANGUAGES for label, value in card_choices(lang)}
    text = shown.get(str(given), str(given or HERE))
    return "" if text == HERE else text


def here() -> tuple[Device, ...]:
    """The GPUs of this machine, or the card that the environment has it stand for."""
    with suppress(UserError):  # the panel says so
        planned = cards.planned(gpu=Settings.from_environment().gpu)
        return cards.visible() if planned is None else (planned,)
    return cards.visible()


def _machine(devices: Sequence[Device], lang: str | None) -> str:
    """The GPUs of this machine in a few words."""
    if devices and devices[0].planned:
        return say("planned", lang, name=devices[0].name)
    names = dict.fromkeys(device.name for device in devices)
    counted = (f"{sum(device.name == name for device in devices)} x {name}" for name in names)
    return ", ".join(counted) or "CPU"


def _described(preset: Preset) -> str:
    arguments = preset.arguments
    model = str(arguments.get("model_name_or_path", "")).rpartition("/")[2]
    method = {"lora": "LoRA", "qlora": "QLoRA"}.get(preset.method, preset.method)
    stage = str(arguments.get("stage", "sft"))
    tokens = f"cutoff_len {arguments.get('cutoff_len', 2048)}"
    parts = [model, method, *([stage.upper()] if stage != "sft" else []), tokens]
    if arguments.get("deepspeed"):
        parts.append(str(arguments["deepspeed"]).rpartition("/")[2].removesuffix(".json"))
    return ", ".join(parts)
