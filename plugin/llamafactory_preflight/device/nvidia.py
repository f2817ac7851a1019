"""NVIDIA cards and their MIG slices, asked of the driver through NVML."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llamafactory_preflight.device import choice, driver, processes
from llamafactory_preflight.device.card import Device, DriverError, context_of
from llamafactory_preflight.device.processes import Process
from llamafactory_preflight.phrases import phrase


def devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The cards that a CUDA process started now would see, in its order; empty without a driver.

    On a machine with unlike cards CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML counts as
    that setting does.

    Raises:
        DriverError: There is a driver, and it does not answer.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fault = driver.fault_of(pynvml, error)
        if fault is None:
            return ()
        raise DriverError(fault) from None
    try:
        return tuple(
            _described(pynvml, handle, number, place, environ)
            for place, (handle, number) in enumerate(_selected(pynvml, environ.get("CUDA_VISIBLE_DEVICES")))
        )
    except pynvml.NVMLError as error:
        raise DriverError(phrase(driver.NO_ANSWER, error=error)) from None
    except AttributeError as error:
        raise DriverError(
            phrase("The installed nvidia-ml-py is too old ({error}): pip install -U nvidia-ml-py", error=error)
        ) from None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _selected(nvml: Any, text: str | None) -> Iterator[tuple[Any, int]]:
    """Handle and number of each card; a card in MIG mode is seen as one slice, and CUDA sees one slice in all."""
    count = nvml.nvmlDeviceGetCount()
    cards = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
    if text is not None and text.startswith("MIG-"):
        slices = [(part, number) for number, card in enumerate(cards) for part in _slices(nvml, card)]
        first = text.split(",")[0].strip()
        names = [_text(nvml.nvmlDeviceGetUUID(part)) for part, _ in slices]
        old_names = [_old_name(nvml, part, cards[number]) for part, number in slices]
        places = choice.chosen(first, count=len(slices), uuids=names, prefix="MIG-")
        yield from [slices[place] for place in places or [at for at, old in enumerate(old_names) if old == first]][:1]
        return
    has_slice = False
    for number in choice.chosen(text, count=count, uuids=[_text(nvml.nvmlDeviceGetUUID(card)) for card in cards]):
        if not _in_mig_mode(nvml, cards[number]):
            yield cards[number], number
        elif not has_slice:
            first_slice = next(_slices(nvml, cards[number]), None)
            has_slice = first_slice is not None
            if has_slice:
                yield first_slice, number


def _in_mig_mode(nvml: Any, card: Any) -> bool:
    with suppress(nvml.NVMLError, AttributeError):
        return bool(nvml.nvmlDeviceGetMigMode(card)[0])
    return False  # too old for it


def _slices(nvml: Any, card: Any) -> Iterator[Any]:
    if not _in_mig_mode(nvml, card):
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with suppress(nvml.NVMLError):  # the places of a card need not all be taken
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)


def _old_name(nvml: Any, part: Any, card: Any) -> str:
    """How drivers before R470 named a slice: `MIG-GPU-<uuid>/<GPU instance>/<compute instance>`."""
    with suppress(nvml.NVMLError):
        instances = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
        return f"MIG-{_text(nvml.nvmlDeviceGetUUID(card))}/{instances[0]}/{instances[1]}"
    return ""


def _described(nvml: Any, handle: Any, number: int, place: int, environ: Mapping[str, str]) -> Device:
    capability: tuple[int, int] | None = None
    with suppress(nvml.NVMLError):
        # A slice does not say, its card does.
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(number)))
    device = Device(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=None,
        free_bytes=None,
        index=place,
        compute_capability=capability,
        physical_index=number,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return device  # it shares main memory with the processor (GB10, Jetson)
    total, free, reserved = int(memory.total), int(memory.free), 0
    with suppress(nvml.NVMLError, AttributeError):
        reserved = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved)
    running = _processes(nvml, handle)
    ours = {pid for pid in running if processes.is_ours(pid, environ)}
    # In many containers the driver lists no process, and then not this one either.
    own = sum(running[pid] or 0 for pid in ours) or _own_context(place, total, total - free - reserved, environ)
    others = tuple(
        Process(pid=pid, name=processes.name_of(pid), used_bytes=used)
        for pid, used in sorted(running.items(), key=lambda item: (-(item[1] or 0), item[0]))
        if pid not in ours
    )
    return replace(
        device,
        total_bytes=total,
        free_bytes=min(total, free + own),
        processes=others,
        reserved_bytes=reserved,
    )


def _processes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Bytes by process; one that computes and draws is in two lists with the same amount."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        with suppress(nvml.NVMLError, AttributeError):
            for process in getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle):
                used = getattr(process, "usedGpuMemory", None)
                found[process.pid] = max(used or 0, found.get(process.pid) or 0) or None
    return found


def _own_context(place: int, total: int, taken: int, environ: Mapping[str, str]) -> int:
    """The CUDA context that this run already has on the card; torch is asked only where it was started here.

    Under torchrun the other ranks are as far as this one and have theirs on the other cards.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    has_one = "LOCAL_RANK" in environ or cuda.current_device() == place
    return max(0, min(context_of(total), taken)) if has_one else 0


def _text(value: str | bytes) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return re.sub(r"[^\x20-\x7e]", "?", text)
