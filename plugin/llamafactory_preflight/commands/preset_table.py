"""The table of presets: what each is for, and whether it fits the GPU that is here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llamafactory_preflight import device, preflight, presets, report
from llamafactory_preflight.device import Device, smallest
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.machine import host, survey
from llamafactory_preflight.presets import Preset
from llamafactory_preflight.result import Result


_MARGIN = 0.985
"""A measured run needs no wider bounds than these: slack of the allocator, and another card's workspaces."""
HEADER = ("preset", "tier", "model", "method", "context", "measured", "here", "fits here")


def lines(chosen: Sequence[Preset]) -> list[str]:
    """One line a preset below a header. Models are looked up in the local cache only, so that the list is quick."""
    devices, budget = device.visible(), host.available_bytes()
    rows = [HEADER, *(_row(preset, devices, budget) for preset in chosen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(preset: Preset, devices: tuple[Device, ...], host_budget_bytes: int | None) -> tuple[str, ...]:
    given = preset.arguments
    model = str(given.get("model_name_or_path", "")).rpartition("/")[2]
    measured = report.size(preset.measured.peak_bytes) if preset.measured else "-"
    known = (preset.name, preset.tier, model, preset.method, str(given.get("cutoff_len", "")), measured)
    try:
        result = preflight.examine(
            given,
            origin=str(preset.file),
            beside=preset.file.parent,
            devices=devices[: preset.num_gpus] if len(devices) >= preset.num_gpus else _of_its_tier(preset),
            host_budget_bytes=host_budget_bytes,
            environ=os.environ | {"HF_HUB_OFFLINE": "1", "USE_MODELSCOPE_HUB": "0"},
        )
    except UserError:
        return (*known, "-", "unknown")
    peak = report.size(result.estimate.peak_allocated_bytes) if result.estimate else "-"
    return (*known, peak, _fits(preset, result, devices))


def _of_its_tier(preset: Preset) -> tuple[Device, ...]:
    """The cards that a preset is for: where too few are here, its ranks are counted all the same."""
    if preset.tier == presets.ANY:
        return ()
    return survey.taking_part(device.planned(gpu=f"{preset.tier_gb}GiB"), gpus=preset.num_gpus)


def _fits(preset: Preset, result: Result, devices: tuple[Device, ...]) -> str:
    """In a word or two; where the run is not modelled or the model not in the cache, by what was measured."""
    if not devices and not result.run.use_cpu and preset.tier != presets.ANY:
        return "no GPU"
    if devices and len(devices) < preset.num_gpus:
        return f"needs {preset.num_gpus} GPUs"
    if any(finding.id == "no-bf16" for finding in result.findings):
        return "no bf16 here"
    if result.verdict.word != "unknown" or preset.measured is None or not devices:
        return result.verdict.word.replace("_", " ")
    least = smallest(devices[: preset.num_gpus])
    free = (least.free_bytes or 0) - least.context_bytes
    return "fits, as measured" if preset.measured.peak_bytes < free * _MARGIN else "will not fit, as measured"
