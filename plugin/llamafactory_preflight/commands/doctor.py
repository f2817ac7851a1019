"""Is the plugin live here, what is installed, and what is known not to work together."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from llamafactory_preflight import device, findings, report, settings
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.machine import host
from llamafactory_preflight.model import hub
from llamafactory_preflight.settings import Settings
from llamafactory_preflight.software import Software


OPTIONAL = {
    "deepspeed": "ZeRO-2 and ZeRO-3",
    "bitsandbytes": "QLoRA",
    "liger_kernel": "enable_liger_kernel",
    "flash_attn": "flash_attn=fa2",
}


def is_hook_live() -> bool:
    """Whether the startup file put our finder into this interpreter."""
    return any(type(finder).__module__ == "llamafactory_preflight._startup" for finder in sys.meta_path)


def lines() -> Iterator[str]:
    """The report, line by line."""
    software = Software.installed()
    live = is_hook_live()
    yield _row("startup hook", "live" if live else "NOT LIVE: install the plugin into this environment with pip")
    try:
        chosen = Settings.from_environment()
        yield _row("preflight", f"{chosen.mode}  ({settings.PREFLIGHT_VARIABLE})")
        yield _row("template", f"{chosen.template}  ({settings.TEMPLATE_VARIABLE})")
    except UserError as error:
        yield _row("switches", str(error))
    yield _row("presets", str(paths.pack_folder() or "NOT FOUND: reinstall llamafactory-preflight"))
    yield ""
    yield _row("python", sys.version.split()[0])
    for name, version in software.as_dict().items():
        use = f"not installed; needed for {OPTIONAL[name]}" if name in OPTIONAL else "NOT INSTALLED"
        yield _row(name.replace("_", "-"), version or use)
    yield ""
    seen = device.survey()
    for gpu in seen.devices:
        holders = ", ".join(f"{process.name or 'PID'} {process.pid}" for process in gpu.processes)
        yield _row(
            f"GPU {gpu.index}",
            f"{gpu.name}, {report.size(gpu.free_bytes)} free of {report.size(gpu.total_bytes)}"
            f"{f', in use by {holders}' if holders else ''}",
        )
    if not seen.devices:
        yield _row("GPU", seen.fault or "none that torch could use")
    yield _row("main memory", f"{report.size(host.available_bytes())} available")
    cache = hub.huggingface_cache(None)
    yield _row("model cache", f"{cache}, {report.size(host.free_disk_bytes(cache))} free")
    for finding in findings.bad_pairs(software):
        yield f"{finding.severity}: {report.message(finding)}"


def is_healthy() -> bool:
    """Whether the plugin works in this environment."""
    return is_hook_live() and Software.installed().llamafactory is not None and paths.pack_folder() is not None


def _row(name: str, value: str) -> str:
    return f"{name:<24}{value}"
