"""What a card cannot do, who else is on it, and what lies between it and the process."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from llamafactory_preflight.device import Device, Process, sold_alike
from llamafactory_preflight.machine import host
from llamafactory_preflight.phrases import joined, phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB


BUSY_BYTES = GIB
SHOWN_PROCESSES = 5
END_IT = "End it, or choose another card with CUDA_VISIBLE_DEVICES."


def card(run: RunDescription, device: Device, software: Software, *, fits: bool = True) -> Iterator[Finding]:
    """What the deciding card cannot do, or does already; the latter matters where the run does not fit for certain."""
    if device.kind == "cuda" and device.compute_capability is not None:
        yield from _generation(run, device, device.compute_capability, software)
    if device.kind != "cuda":
        yield Finding(
            id="device-not-measured",
            severity="info",
            message="The prediction was measured on NVIDIA cards only, and is rough for this device.",
        )
    if device.taken_bytes > BUSY_BYTES:
        yield _in_use(device, fits=fits)


def as_sold(device: Device, high_bytes: int) -> Iterator[Finding]:
    """A card has less than it is sold with; that is told where a run may not get by with what is left."""
    alike = sold_alike(device)
    if alike and high_bytes > min(alike.values()):
        yield Finding(
            id="less-than-sold",
            severity="info",
            message=phrase(
                "Cards sold with this size have less for torch, as little as {least}: {names}. Plan for one by its "
                "name.",
                names=", ".join(alike),
            ),
            amounts={"least": min(alike.values())},
        )


def _generation(
    run: RunDescription, device: Device, capability: tuple[int, int], software: Software
) -> Iterator[Finding]:
    if not device.is_ampere:
        if run.bf16 or run.pure_bf16:
            chosen = {name: False for name in ("bf16", "pure_bf16") if getattr(run, name)}
            yield Finding(
                id="no-bf16",
                severity="warning",
                message=phrase(
                    "{card} has no bf16: torch imitates it, many times slower. Train in fp16 there.", card=device.name
                ),
                set={**chosen, "fp16": True},
            )
        if run.flash_attn == "fa2":
            yield Finding(
                id="no-fa2",
                severity="error"
                if software.flash_attn is not None
                else "warning",  # else LLaMA-Factory passes it over
                message=phrase(
                    "FlashAttention-2 refuses {card}: it needs compute capability 8.0, and this has {capability}.",
                    card=device.name,
                    capability=f"{capability[0]}.{capability[1]}",
                ),
                set={"flash_attn": "sdpa"},
            )
    elif run.fp16:
        yield Finding(
            id="fp16-where-bf16",
            severity="info",
            message=phrase(
                "{card} has bf16, which takes as much memory as fp16 and does not overflow.", card=device.name
            ),
            set={"fp16": False, "bf16": True},
        )


def _in_use(device: Device, *, fits: bool) -> Finding:
    amounts = {"taken": device.taken_bytes}
    parts = []
    for place, process in enumerate(device.processes[:SHOWN_PROCESSES]):
        parts.append(_holder(process, place))
        if process.used_bytes is not None:
            amounts[f"held{place}"] = process.used_bytes
    more = len(device.processes) - SHOWN_PROCESSES
    if more > 0:
        parts.append(phrase("{num} more", num=more))
    # Where the driver says of nobody how much he holds (Windows), all of it would seem hidden.
    told = not device.processes or any(process.used_bytes is not None for process in device.processes)
    if told and device.hidden_bytes > BUSY_BYTES // 2:
        parts.append("{hidden} of processes that cannot be seen from here (another container or user)")
        amounts["hidden"] = device.hidden_bytes
    message = phrase("{taken} of GPU {index} are in use by something else.", index=device.index)
    if parts:
        message = phrase(
            "{taken} of GPU {index} are in use by something else: {who}.", index=device.index, who=joined("; ", parts)
        )
    return Finding(
        id="gpu-in-use",
        severity="info" if fits else "warning",
        message=message if fits else joined(" ", (message, END_IT)),
        amounts=amounts,
    )


def _holder(process: Process, place: int) -> str:
    # A name is another's text: braces in it must not be taken for an amount.
    name = process.name.replace("{", "(").replace("}", ")") if process.name else None
    holder = phrase("{name} (PID {pid})", name=name, pid=process.pid) if name else f"PID {process.pid}"
    if process.used_bytes is None:
        return holder
    return phrase("{process} with {held}", process=holder, held=f"{{held{place}}}")


def unusable(fault: str | None) -> Iterator[Finding]:
    """A device that is there and cannot be used or asked; LLaMA-Factory silently trains on the CPU then."""
    if fault is not None:
        yield Finding(id="gpu-unusable", severity="warning", message=phrase("{sentence}.", sentence=fault))


def windows(
    run: RunDescription, *, fits: bool, environ: Mapping[str, str], system: str | None = None, wsl: bool | None = None
) -> Iterator[Finding]:
    """Windows, and Linux inside of it, move what exceeds the card into main memory, and let little memory be pinned.

    Source: NVIDIA's "CUDA on WSL" user guide (pinned memory) and its driver's setting "CUDA - Sysmem Fallback Policy".
    """
    is_wsl = host.is_wsl(environ) if wsl is None else wsl
    is_windows = (platform.system() if system is None else system) == "Windows"
    if (is_wsl or is_windows) and not fits:
        yield Finding(
            id="windows-spill",
            severity="warning",
            message="Windows does not let a run fail that exceeds the card: it moves the rest into main memory, and "
            "the run becomes many times slower. To have it fail instead, set CUDA - Sysmem Fallback Policy in the "
            "NVIDIA Control Panel to Prefer No Sysmem Fallback.",
        )
    if is_wsl and _pins(run):
        yield Finding(
            id="wsl-pinned",
            severity="warning",
            message="WSL lets little memory be pinned, and offloading fails there with an out-of-memory error. Set "
            "pin_memory to false in the DeepSpeed file.",
        )


def _pins(run: RunDescription) -> bool:
    section = (run.deepspeed or {}).get("zero_optimization")
    parts = [section.get(key) for key in ("offload_optimizer", "offload_param")] if isinstance(section, dict) else []
    return any(isinstance(part, dict) and part.get("pin_memory") is True for part in parts)
