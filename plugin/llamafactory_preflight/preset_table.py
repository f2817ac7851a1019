"""The table of presets: what each is for, and whether it fits the GPU that is here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llamafactory_preflight import device, host, preflight, presets, report
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.presets import Preset


HEADER = ("preset", "tier", "model", "method", "context", "peak", "fits here")


def lines(chosen: Sequence[Preset]) -> list[str]:
    """One line a preset below a header. Models are looked up in the local cache only, so that the list is quick."""
    devices, budget = device.visible(), host.available_bytes()
    rows = [HEADER, *(_row(preset, devices, budget) for preset in chosen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(preset: Preset, devices: tuple[Device, ...], host_budget_bytes: int | None) -> tuple[str, ...]:
    given = preset.arguments
    model = str(given.get("model_name_or_path", "")).rpartition("/")[2]
    method = ("q" if given.get("quantization_bit") else "") + str(given.get("finetuning_type", "lora"))
    peak, fits = "-", "no GPU"
    try:
        result = preflight.examine(
            given,
            origin=str(preset.file),
            beside=preset.file.parent,
            devices=devices,
            host_budget_bytes=host_budget_bytes,
            environ=os.environ | {"HF_HUB_OFFLINE": "1", "USE_MODELSCOPE_HUB": "0"},
        )
    except UserError:
        return (preset.name, preset.tier, model, method, str(given.get("cutoff_len", "")), peak, "unknown")
    if result.estimate is not None:
        peak = report.size(result.estimate.peak_allocated_bytes)
    if devices or result.run.use_cpu or preset.tier == presets.ANY:
        fits = result.verdict.word.replace("_", " ")
    return (preset.name, preset.tier, model, method, str(result.run.cutoff_len), peak, fits)
