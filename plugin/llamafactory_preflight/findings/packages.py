"""Installed packages: those that a run needs, and versions that do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes.util import find_library

from llamafactory_preflight.device import Device
from llamafactory_preflight.model.shape import FAMILIES
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software, release_of


def bad_pairs(software: Software, run: RunDescription | None = None) -> Iterator[Finding]:
    """Versions that are known not to work together; with a run, only those that it would use."""
    flash = run is None or run.flash_attn == "fa2"
    if flash and software.flash_attn and software.transformers and release_of(software.transformers) == (5, 6, 0):
        yield Finding(
            id="transformers-5.6.0-fa2",
            severity="warning",
            message="transformers 5.6.0 crashes with FlashAttention-2. Use another version of it, or flash_attn=sdpa.",
            set={"flash_attn": "sdpa"},
        )
    if software.deepspeed is None or software.llamafactory is None or (run is not None and run.deepspeed is None):
        return
    factory, deepspeed = release_of(software.llamafactory), release_of(software.deepspeed)
    limits: dict[tuple[int, ...], tuple[int, ...]] = {(0, 9, 4): (0, 16, 9), (0, 9, 6): (0, 18, 4)}
    limit = limits.get(factory)
    if limit is not None and deepspeed > limit:
        highest = ".".join(map(str, limit))
        yield Finding(
            id="deepspeed-too-new",
            severity="warning",
            message=phrase(
                "LLaMA-Factory {version} is made for DeepSpeed up to {highest}; {installed} is installed.",
                version=software.llamafactory,
                highest=highest,
                installed=software.deepspeed,
            ),
        )


def would_help(run: RunDescription, software: Software, *, model_type: str, num_gpus: int) -> Iterator[Finding]:
    """What a run that does not fit could use if it were installed: no remedy needs a package that is missing."""
    family = FAMILIES.get(model_type)
    if software.liger_kernel is None and not run.enable_liger_kernel and family is not None and family.liger:
        yield Finding(
            id="liger-kernel-would-help",
            severity="info",
            message="enable_liger_kernel=true lowers the peak at no cost, mostly that of the logits. It needs a "
            "package: pip install liger-kernel",
        )
    if software.bitsandbytes is None and run.finetuning_type in ("lora", "oft") and run.quantization_bit is None:
        yield Finding(
            id="bitsandbytes-would-help",
            severity="info",
            message="quantization_bit=4 would load the base weights in 4 bit. It needs a package: "
            "pip install bitsandbytes",
        )
    if num_gpus > 1 and run.deepspeed is None and run.fsdp_plan is None and software.deepspeed is None:
        yield Finding(
            id="deepspeed-would-share",
            severity="info",
            message="ZeRO could share out among the GPUs what each now holds in full. It needs a package: "
            "pip install deepspeed",
        )


def missing_libaio(run: RunDescription, *, found: bool | None = None) -> Iterator[Finding]:
    """DeepSpeed reads and writes an NVMe through a library of the system, and fails late without it."""
    section = (run.deepspeed or {}).get("zero_optimization")
    parts = [section.get(key) for key in ("offload_optimizer", "offload_param")] if isinstance(section, dict) else []
    wanted = any(isinstance(part, dict) and part.get("device") == "nvme" for part in parts)
    if wanted and not (find_library("aio") is not None if found is None else found):
        yield Finding(
            id="libaio-missing",
            severity="warning",
            message="Offloading to NVMe needs the library libaio, which is not installed here: "
            "apt-get install libaio-dev, and DeepSpeed then builds its async_io with it.",
        )


def missing_packages(run: RunDescription, software: Software, device: Device | None = None) -> Iterator[Finding]:
    """Packages that the arguments ask for and this environment lacks."""
    wanted = {
        "deepspeed": run.deepspeed is not None,
        "bitsandbytes": run.quantization_bit is not None and run.quantization_method in {"bnb", "bitsandbytes"},
        "liger_kernel": run.enable_liger_kernel,
    }
    for name, is_wanted in wanted.items():
        if is_wanted and getattr(software, name) is None:
            package = name.replace("_", "-")
            yield Finding(
                id=f"{package}-missing",
                severity="warning",
                message=phrase(
                    "The run needs {package}, which is not installed here: pip install {package}", package=package
                ),
            )
    # torch_npu brings its own; elsewhere LLaMA-Factory says so in one line of its log and goes on with the default.
    has_use = device is None or (device.kind != "npu" and device.is_ampere)
    if run.flash_attn == "fa2" and software.flash_attn is None and has_use:
        yield Finding(
            id="flash-attn-missing",
            severity="warning",
            message="flash-attn is not installed here, so LLaMA-Factory passes over flash_attn=fa2 and uses sdpa. "
            "To have it: pip install flash-attn --no-build-isolation",
            set={"flash_attn": "sdpa"},
        )
