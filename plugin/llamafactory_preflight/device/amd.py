"""AMD cards, read from the kernel's files: ROCm's own tools need not be installed, and nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llamafactory_preflight.device import choice, processes
from llamafactory_preflight.device.card import Device
from llamafactory_preflight.device.processes import Process
from llamafactory_preflight.units import GIB


SYSFS = Path("/sys")
SMALLEST = 4 * GIB  # No card of its own that ROCm supports has less; less is what a processor's GPU has set aside.


def devices(environ: Mapping[str, str], *, sysfs: Path = SYSFS) -> tuple[Device, ...]:
    """The cards that a HIP process started now would see, in its order.

    Their order is that of the kernel's topology (Documentation of `amdkfd`), of which ROCR_VISIBLE_DEVICES chooses
    first and HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, from the rest.
    """
    kfd = sysfs / "class" / "kfd" / "kfd"
    every = [found for node in _nodes(kfd / "topology" / "nodes") if (found := _card(kfd, sysfs, node, environ))]
    for text in (
        environ.get("ROCR_VISIBLE_DEVICES"),
        environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        numbers = choice.chosen(text, count=len(every), uuids=[card.uuid or "" for card in every])
        every = [every[number] for number in numbers]
    return tuple(replace(card, index=place) for place, card in enumerate(every))


def _nodes(folder: Path) -> list[Path]:
    try:
        return sorted((node for node in folder.iterdir() if node.name.isdigit()), key=lambda node: int(node.name))
    except OSError:
        return []


def _card(kfd: Path, sysfs: Path, node: Path, environ: Mapping[str, str]) -> Device | None:
    properties = _properties(node / "properties")
    if not properties.get("simd_count"):
        return None  # a processor, or a card that this container may not use
    card = sysfs / "class" / "drm" / f"renderD{properties.get('drm_render_minor', 0)}" / "device"
    total, used = _number(card / "mem_info_vram_total"), _number(card / "mem_info_vram_used")
    if properties.get("cpu_cores_count") or (total or 0) < SMALLEST:
        total = used = None  # it shares main memory with the processor, and what torch gets of it is not said here
    holders = _holders(kfd / "proc", _number(node / "gpu_id"))
    own = sum(size for pid, size in holders.items() if processes.is_ours(pid, environ))
    unique = properties.get("unique_id")
    return Device(
        name=_text(card / "product_name") or f"AMD {_architecture(properties.get('gfx_target_version', 0))}",
        total_bytes=total,
        free_bytes=None if total is None or used is None else min(total, max(0, total - used + own)),
        processes=tuple(
            Process(pid=pid, name=processes.name_of(pid), used_bytes=size)
            for pid, size in sorted(holders.items(), key=lambda item: -item[1])
            if not processes.is_ours(pid, environ)
        ),
        kind="rocm",
        physical_index=int(node.name),
        uuid=f"GPU-{unique:016x}" if unique else None,
    )


def _holders(folder: Path, gpu_id: int | None) -> dict[int, int]:
    sizes = {int(entry.name): _number(entry / f"vram_{gpu_id}") for entry in _nodes(folder)}
    return {pid: size for pid, size in sizes.items() if size}


def _architecture(version: int) -> str:
    """90402 is gfx942, and 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isascii() and text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
