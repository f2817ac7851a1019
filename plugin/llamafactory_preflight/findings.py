"""Small named checks around a run's memory. Each yields what it found, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llamafactory_preflight import host, hub
from llamafactory_preflight.device import Device
from llamafactory_preflight.hub import ModelSource
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.settings import is_enabled
from llamafactory_preflight.software import Software, release_of
from llamafactory_preflight.units import GIB


BUSY_BYTES = GIB


def launch(run: RunDescription, *, origin: str, num_gpus: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """LLaMA-Factory refuses DeepSpeed outside of torchrun, which it starts by itself only for several GPUs."""
    forced = is_enabled(environ, "FORCE_TORCHRUN")
    inside_torchrun = "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ
    if run.deepspeed is not None and num_gpus <= 1 and not forced and not inside_torchrun:
        yield Finding(
            id="deepspeed-needs-torchrun",
            severity="error",
            message="LLaMA-Factory runs DeepSpeed on one GPU only under torchrun. "
            f"Start it so: FORCE_TORCHRUN=1 llamafactory-cli train {origin}",
        )


def json_file(origin: str, software: Software) -> Iterator[Finding]:
    """LLaMA-Factory 0.9.5 hands a path to `json.load`, which takes an open file."""
    if origin.endswith(".json") and software.at_least("llamafactory", 0, 9, 5):
        yield Finding(
            id="json-not-read",
            severity="warning",
            message=f"LLaMA-Factory {software.llamafactory} cannot read .json files. Rename it to .yaml.",
        )


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
            message=f"LLaMA-Factory {software.llamafactory} is made for DeepSpeed up to {highest}; "
            f"{software.deepspeed} is installed.",
        )


def missing_packages(run: RunDescription, software: Software) -> Iterator[Finding]:
    """Packages that the arguments ask for and this environment lacks."""
    wanted = {
        "deepspeed": run.deepspeed is not None,
        "bitsandbytes": run.quantization_bit is not None and run.quantization_method in {"bnb", "bitsandbytes"},
        "liger_kernel": run.enable_liger_kernel,
        "flash_attn": run.flash_attn == "fa2",
    }
    for name, is_wanted in wanted.items():
        if is_wanted and getattr(software, name) is None:
            package = name.replace("_", "-")
            yield Finding(
                id=f"{package}-missing",
                severity="warning",
                message=f"The run needs {package}, which is not installed here: pip install {package}",
            )


def card(run: RunDescription, device: Device) -> Iterator[Finding]:
    """What the deciding card cannot do, or does already."""
    if run.bf16 and device.compute_capability is not None and device.compute_capability < (8, 0):
        yield Finding(
            id="no-bf16",
            severity="warning",
            message=f"{device.name} has no bf16. Train in fp16 there.",
            set={"bf16": False, "fp16": True},
        )
    if not device.planned and device.total_bytes is not None and device.free_bytes is not None:
        taken = device.total_bytes - device.free_bytes
        if taken > BUSY_BYTES:
            others = f" Processes on it: {', '.join(map(str, device.processes))}." if device.processes else ""
            yield Finding(
                id="gpu-in-use",
                severity="info",
                message=f"{{taken}} of GPU {device.index} are in use by something else.{others}",
                amounts={"taken": taken},
            )


def host_memory(estimate: MemoryEstimate, budget_bytes: int | None) -> Iterator[Finding]:
    """Main memory is a second budget; its estimate is rough, so this is never more than a warning."""
    if budget_bytes is not None and estimate.host_bytes > budget_bytes:
        yield Finding(
            id="host-memory",
            severity="warning",
            message="The run may take {wanted} of main memory, and {available} are available.",
            amounts={"wanted": estimate.host_bytes, "available": budget_bytes},
        )


def disk_for_weights(source: ModelSource) -> Iterator[Finding]:
    """Weights still to be downloaded, against the disk that they go to."""
    free = host.free_disk_bytes(source.cache_dir)
    if source.download_bytes and free is not None and source.download_bytes > free:
        yield Finding(
            id="disk-weights",
            severity="error",
            message=f"The weights take {{wanted}} to download, and {{free}} are free at {source.cache_dir}.",
            amounts={"wanted": source.download_bytes, "free": free},
        )


def disk_for_checkpoints(run: RunDescription, estimate: MemoryEstimate) -> Iterator[Finding]:
    """Checkpoints to be kept, against the disk that they go to."""
    if not (run.do_train and run.output_dir):
        return
    free = host.free_disk_bytes(hub.expanded(run.output_dir))
    wanted = saved_bytes(run, estimate)
    if free is not None and wanted > free:
        yield Finding(
            id="disk-checkpoints",
            severity="error",
            message=f"Checkpoints take about {{wanted}}, and {{free}} are free at {run.output_dir}. "
            "Fewer of them: save_total_limit=1, save_only_model=true.",
            amounts={"wanted": wanted, "free": free},
            set={"save_total_limit": 1, "save_only_model": True},
        )


def saved_bytes(run: RunDescription, estimate: MemoryEstimate) -> int:
    """Rough size of what a training leaves on disk at its fullest: the final model, and the checkpoints kept.

    Without `save_total_limit` the number of checkpoints is not known before the data is read, so one is counted.
    While a checkpoint is written, the one it replaces is still there.
    """
    parts = estimate.components
    trains_adapters = run.finetuning_type in {"lora", "oft"}
    model = parts["adapters"] if trains_adapters else parts["weights"]
    if run.save_strategy == "no":
        return model
    checkpoint = model + (0 if run.save_only_model else parts["optimizer"])
    kept = 1 if run.save_total_limit is None else max(1, run.save_total_limit) + 1
    return model + kept * checkpoint
