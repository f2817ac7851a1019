"""The GPUs of this machine, asked of the driver through NVML: no CUDA context, so nothing on the card is touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB, MIB, parse_memory


# Total memory as torch reports it, commonly seen values in GiB; the smaller one where reports differ.
CARDS = {
    "rtx3060": 11.8, "rtx4070": 11.99, "t4": 14.6, "rtx4060ti": 15.7, "rtx4080": 15.7, "v100": 15.8, "a10": 22.1,
    "l4": 22.1, "rtx3090": 23.6, "rtx4090": 23.6, "rtx5090": 31.4, "v100-32gb": 31.7, "a100-40gb": 39.4, "l40s": 44.4,
    "a100": 79.1, "h100": 79.1, "h200": 139.8,
}  # fmt: skip

# A process's CUDA context with cuBLAS, beside what torch's allocator holds. 0.67 GiB was measured on an H200 (driver
# 580, CUDA 13.0). It grows with the number of multiprocessors, so smaller cards take less; those values are estimates.
CONTEXT_BY_TOTAL = ((60 * GIB, 686 * MIB), (28 * GIB, 560 * MIB), (0, 460 * MIB))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, real or planned for.

    Attributes:
        name: As the driver or the user calls it.
        total_bytes: Its memory, or None where it is unknown (a MIG slice).
        free_bytes: What of it is free now, or None likewise; for a planned card all of it.
        index: Position among the visible GPUs, as CUDA counts them.
        compute_capability: Major and minor, or None where unknown.
        processes: Identifiers of the processes that compute on it.
        planned: Whether the user named it, so that nothing was measured.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    index: int = 0
    compute_capability: tuple[int, int] | None = None
    processes: tuple[int, ...] = ()
    planned: bool = False

    @property
    def context_bytes(self) -> int:
        """What one process takes beside its tensors."""
        total = self.total_bytes or 0
        return next(context for least, context in CONTEXT_BY_TOTAL if total >= least)


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


def visible(environ: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    """The NVIDIA GPUs that a CUDA process started now would see, in its order; empty without a driver.

    On a machine with unlike cards CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML counts as
    that setting does.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = _selected(pynvml, os.environ if environ is None else environ)
        return tuple(_described(pynvml, handle, index) for index, handle in enumerate(handles))
    except pynvml.NVMLError:
        return ()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def smallest(devices: Sequence[Device]) -> Device:
    """The device with the least free memory: it decides, as every rank does the same work."""
    assert devices
    return min(devices, key=lambda device: -1 if device.free_bytes is None else device.free_bytes)


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


def _selected(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """NVML handles in the order of CUDA_VISIBLE_DEVICES; a string in place of a handle for a MIG slice."""
    count = nvml.nvmlDeviceGetCount()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles: list[Any] = []
    for item in (part.strip() for part in chosen.split(",")):
        if item.startswith("MIG-"):
            handles.append(item)
        elif item.startswith("GPU-"):
            # CUDA takes any unambiguous prefix of the identifier.
            every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            matching = [handle for handle in every if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(item)]
            if len(matching) != 1:
                break
            handles += matching
        elif item.isdigit() and int(item) < count:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(item)))
        else:
            break  # As CUDA does: what follows an invalid entry is not visible.
    return handles


def _described(nvml: Any, handle: Any, index: int) -> Device:
    if isinstance(handle, str):
        return Device(name=handle, total_bytes=None, free_bytes=None, index=index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability: tuple[int, int] | None = None
    processes: tuple[int, ...] = ()
    with suppress(nvml.NVMLError):
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    with suppress(nvml.NVMLError):
        processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Device(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        index=index,
        compute_capability=capability,
        processes=processes,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
