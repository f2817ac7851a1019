"""Whether NVIDIA's driver works, and for which CUDA."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from llamafactory_preflight.phrases import phrase


NO_ANSWER = (
    "The NVIDIA driver does not answer ({error}), and LLaMA-Factory may train on the CPU: see what nvidia-smi says, "
    "and restart the container or the machine"
)
CONTROL = Path("/dev/nvidiactl")


def fault_of(nvml: Any, error: Exception) -> str | None:
    """What a failure to start NVML means for a run, or None where there is no driver."""
    value = getattr(error, "value", None)
    if value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return None
    if value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return (
            "There is an NVIDIA GPU, and libnvidia-ml, which tells of its memory, is missing: start the container "
            "with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or name the card in LLAMAFACTORY_PREFLIGHT_GPU"
            if CONTROL.exists()
            else None
        )
    if value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return (
            "The NVIDIA driver was updated and the old one is still loaded, so that CUDA cannot start and "
            "LLaMA-Factory would train on the CPU: reboot"
        )
    return phrase(NO_ANSWER, error=error)


def highest_cuda() -> int | None:
    """The major version of CUDA that the driver can run, or None where it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # whatever is wrong is told elsewhere
        return None
    try:
        return int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except pynvml.NVMLError:
        return None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
