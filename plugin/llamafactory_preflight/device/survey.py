"""Which accelerators a training that starts now would find, and if it finds none although one is there, why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.device import amd, apple, ascend, driver, nvidia, torch_build
from llamafactory_preflight.device.card import Device, DriverError
from llamafactory_preflight.phrases import phrase


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found.

    Attributes:
        devices: In torch's order.
        fault: Why a device that is there cannot be used, as a sentence without a final period; otherwise None.
    """

    devices: tuple[Device, ...] = ()
    fault: str | None = None


def survey(environ: Mapping[str, str] | None = None) -> Survey:
    """Looks for devices in LLaMA-Factory's order (extras/misc.py, `get_device_count`): Ascend, Apple, then the rest.

    Whether the rest is NVIDIA's or AMD's depends on what torch was built for.
    """
    env = os.environ if environ is None else environ
    if torch_build.has("torch_npu") and (found := ascend.devices(env)):
        return Survey(devices=found)
    if found := apple.devices():
        return Survey(devices=found)
    build = torch_build.installed()
    if build is not None and build.hip is not None:
        return Survey(devices=amd.devices(env))
    try:
        found = nvidia.devices(env)
        fault = _why_unusable(build) if found else _why_hidden(env)
    except DriverError as error:
        fault = error.args[0]  # as a phrase, which str() would turn into text
    return Survey(fault=fault) if fault else Survey(devices=found)


def visible(environ: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    """The devices alone."""
    return survey(environ).devices


def _why_hidden(environ: Mapping[str, str]) -> str | None:
    """An empty value and -1 hide all devices on purpose; other values that leave none are mistakes."""
    text = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if text in ("", "-1"):
        return None
    others = nvidia.devices({name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"})
    return (
        phrase(
            "CUDA_VISIBLE_DEVICES={value} leaves none of the {num} GPUs here, so that LLaMA-Factory trains on the "
            "CPU: count from 0, each of them once",
            value=text[:40],
            num=len(others),
        )
        if others
        else None
    )


def _why_unusable(build: torch_build.TorchBuild | None) -> str | None:
    if build is None:
        return None  # no torch here: the card is planned for, not used
    if build.cuda is None:
        return (
            "There is an NVIDIA GPU, but the installed torch is built without CUDA, so that LLaMA-Factory trains on "
            "the CPU: install one that has it"
        )
    wanted, highest = int(build.cuda.split(".")[0]), driver.highest_cuda()
    # Within a major version an older driver will do (CUDA minor version compatibility).
    if highest is not None and highest < wanted:
        return phrase(
            "The NVIDIA driver runs CUDA up to {highest}, and the installed torch is built for {wanted}, so that "
            "LLaMA-Factory trains on the CPU: update the driver, or install a torch for an older CUDA",
            highest=highest,
            wanted=build.cuda,
        )
    return None
