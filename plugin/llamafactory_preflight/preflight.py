"""Puts a preflight together: arguments, model, machine, estimate, verdict; without torch or LLaMA-Factory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from llamafactory_preflight import arguments, findings, host, hub, memory, paths, report, verdict
from llamafactory_preflight import device as cards
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.run import from_arguments
from llamafactory_preflight.settings import GPU_VARIABLE, Settings
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import parse_memory
from llamafactory_preflight.zero import ZeroPlan


MOST_GPUS = 4096
SHORTEST_LENGTH = 16  # Tokens of a sample that any data set may be made of.
SEVERITIES = ("error", "warning", "info")


def check(
    source: Mapping[str, Any] | Path | str,
    *,
    overrides: Sequence[str] = (),
    gpu: str | None = None,
    free: str | None = None,
    device: int | None = None,
    gpus: int | None = None,
    host_ram: str | None = None,
) -> Result:
    """Tells what a training run will take and whether it fits, without loading anything.

    Args:
        source: LLaMA-Factory arguments by name, or the path of a YAML or JSON file, or `-` for standard input.
        overrides: `key=value` items that win over the file, as on LLaMA-Factory's command line.
        gpu: A card to plan for: its total memory as torch reports it (`24GiB`; GB and GiB both mean GiB), or a name
            such as `rtx4090`. The CUDA context is subtracted. Without it, without `free` and `device`, what
            LLAMAFACTORY_PREFLIGHT_GPU names.
        free: What the allocator may use on that card, context already left out (`21.5GiB`).
        device: Which visible GPU to look at; by default all, and the one with the least free memory decides.
        gpus: How many GPUs take part; by default all visible ones, or one for a planned card.
        host_ram: Main memory to plan for (`64GiB`); by default what is available here.

    Returns:
        The prediction in bytes, the verdict and the findings. The verdict is `unknown` where the run is not modelled.

    Raises:
        UserError: A file, an argument or an amount is faulty, or there is neither a GPU nor one to plan for.
    """
    origin = _origin(source)
    given = dict(source) if isinstance(source, Mapping) else arguments.read(_path(source), overrides)
    if isinstance(source, Mapping) and overrides:
        raise UserError("Overrides go with a file, not with a mapping")
    planned = cards.planned(gpu=gpu, free=free)
    if planned is None and device is None:
        planned = cards.planned(gpu=Settings.from_environment().gpu, where=GPU_VARIABLE)
    devices = _devices(planned, device=device, gpus=gpus)
    beside = Path(origin).resolve().parent if origin.endswith(arguments.CONFIG_SUFFIXES) else None
    result = examine(
        given,
        origin=origin,
        beside=beside,
        devices=devices,
        host_budget_bytes=parse_memory(host_ram, where="--host-ram") if host_ram else host.available_bytes(),
    )
    if result.device is None and not result.run.use_cpu:
        raise UserError(
            "There is no NVIDIA GPU here to plan for", next_step="Name a card with --gpu 24GiB, or set use_cpu=true"
        )
    return result


def examine(
    given: Mapping[str, Any],
    *,
    origin: str,
    beside: Path | None,
    devices: tuple[Device, ...],
    host_budget_bytes: int | None,
    environ: Mapping[str, str] | None = None,
) -> Result:
    """Looks at one run on given devices; without any, as a run on the CPU.

    Raises:
        UserError: An argument is faulty.
    """
    env = os.environ if environ is None else environ
    software = Software.installed()
    resolved_arguments, resolved = paths.resolve(given, beside=beside)
    run = from_arguments(
        resolved_arguments, software=software, origin=origin, allow_extra=_enabled(env, "ALLOW_EXTRA_ARGS")
    )
    # LLaMA-Factory falls back to the CPU where there is no GPU, and then main memory holds everything.
    on_cpu = run.use_cpu or not devices
    decisive = None if on_cpu else cards.smallest(devices)
    shape: ModelShape | None = None
    estimate: memory.MemoryEstimate | None = None
    found: list[Finding] = []
    try:
        assert run.model_name_or_path is not None
        model = hub.find(run.model_name_or_path, revision=run.model_revision, cache_dir=run.cache_dir, environ=env)
        found += findings.disk_for_weights(model)
        shape = ModelShape.from_config(model.config)
        if run.deepspeed is not None:
            ZeroPlan.from_config(run.deepspeed, hidden_size=shape.hidden_size)
        card = _card(decisive, num_gpus=len(devices), env=env)
        estimate = memory.estimate(replace(run, use_cpu=on_cpu), shape, software=software, card=card)
        if on_cpu:
            estimate = _in_main_memory(estimate)
        answer = _judge(estimate, decisive, host_budget_bytes)
        found += findings.disk_for_checkpoints(run, estimate)
        found += findings.host_memory(estimate, host_budget_bytes)
    except Unmodelled as error:
        answer = verdict.unknown(f"{error.reason}.")
    found += findings.launch(run, origin=origin, num_gpus=len(devices), environ=env)
    found += findings.json_file(origin, software)
    found += findings.bad_pairs(software, run)
    found += findings.missing_packages(run, software)
    if decisive is not None:
        found += findings.card(run, decisive)
    return Result(
        origin=origin,
        run=run,
        software=software,
        shape=shape,
        estimate=estimate,
        device=decisive,
        devices=() if on_cpu else devices,
        host_budget_bytes=host_budget_bytes,
        verdict=answer,
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
        resolved=resolved,
    )


def guard_train(given: Mapping[str, Any] | Sequence[str], *, stage: Literal["launcher", "process"]) -> None:
    """Looks at a run that is about to start, reports on standard error, and stops it if it certainly cannot fit.

    Args:
        given: What LLaMA-Factory was given: arguments by name, or the command line after `train`.
        stage: `launcher` before torchrun starts, `process` in the process that trains.

    Raises:
        SystemExit: With 1, in `block` mode, where the run cannot fit the GPU at any sample length.
        UserError: An argument is faulty; LLaMA-Factory will say so itself, so this is only a hint.
    """
    settings = Settings.from_environment()
    by_name = given if isinstance(given, Mapping) else arguments.read(list(given))
    command = sys.argv[2:3] if stage == "launcher" else sys.argv[1:2]
    origin = command[0] if command and command[0].endswith(arguments.CONFIG_SUFFIXES) else "the arguments"
    planned = cards.planned(gpu=settings.gpu, where=GPU_VARIABLE)
    result = examine(
        by_name,
        origin=origin,
        beside=Path(origin).resolve().parent if origin != "the arguments" else None,
        devices=_devices(planned, device=None, gpus=None),
        host_budget_bytes=host.available_bytes(),
    )
    print(report.text(result), file=sys.stderr, flush=True)
    if settings.mode == "warn" or result.device is None or result.verdict.word != "will_not_fit":
        return
    if not _fits_when_short(result):
        print(report.REFUSAL, file=sys.stderr, flush=True)
        raise SystemExit(1)
    print(report.LENGTH_DECIDES, file=sys.stderr, flush=True)


def _fits_when_short(result: Result) -> bool:
    """Whether the run could fit if every sample were short; packing fills each sequence, so there it cannot."""
    if result.run.packing or result.shape is None:
        return False
    card = _card(result.device, num_gpus=len(result.devices), env=os.environ)
    length = min(SHORTEST_LENGTH, result.run.cutoff_len)
    estimate = memory.estimate(result.run, result.shape, software=result.software, card=card, length=length)
    return _judge(estimate, result.device, result.host_budget_bytes).word != "will_not_fit"


def _card(decisive: Device | None, *, num_gpus: int, env: Mapping[str, str]) -> memory.Card:
    """What the estimate asks of the card, and of the allocator as the training process will find it configured."""
    torchrun = num_gpus > 1 or _enabled(env, "FORCE_TORCHRUN")
    if "PYTORCH_ALLOC_CONF" in env:  # torch reads it first, and LLaMA-Factory does not touch it
        allocator = env["PYTORCH_ALLOC_CONF"]
    elif torchrun and _enabled({"OPTIM_TORCH": "1", **env}, "OPTIM_TORCH"):
        allocator = "expandable_segments:True"  # LLaMA-Factory's launcher sets it, for torchrun only
    else:
        allocator = env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    card = memory.Card(expandable_segments="expandable_segments:true" in allocator.lower().replace(" ", ""))
    capability = decisive.compute_capability if decisive else None
    return card if capability is None else replace(card, compute_capability=capability)


def _in_main_memory(estimate: memory.MemoryEstimate) -> memory.MemoryEstimate:
    """What would lie on a card lies in main memory; the weights are counted there already."""
    beside_weights = estimate.peak_allocated_bytes - estimate.components["weights"]
    return replace(estimate, host_bytes=estimate.host_bytes + beside_weights)


def _judge(estimate: memory.MemoryEstimate, decisive: Device | None, host_budget_bytes: int | None) -> verdict.Verdict:
    if decisive is None:
        if host_budget_bytes is None:
            return verdict.unknown("This system does not tell how much main memory is available.")
        return verdict.judge_host(estimate.host_bytes, budget_bytes=host_budget_bytes)
    if decisive.free_bytes is None:
        return verdict.unknown(f"The memory of {decisive.name} is not known; name it with --gpu.")
    return verdict.judge_gpu(estimate, context_bytes=decisive.context_bytes, budget_bytes=decisive.free_bytes)


def _devices(planned: Device | None, *, device: int | None, gpus: int | None) -> tuple[Device, ...]:
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus} is not a number of GPUs", next_step=f"Give 1 to {MOST_GPUS}")
    if planned is not None and device is not None:
        raise UserError(
            "--device picks a GPU of this machine, and --gpu or --free describes another", next_step="Give one"
        )
    if planned is not None:
        return tuple(replace(planned, index=index) for index in range(gpus or 1))
    seen = cards.visible()
    if device is not None:
        if not 0 <= device < len(seen):
            raise UserError(
                f"--device {device} does not exist; {len(seen)} GPUs are visible",
                next_step="Count from 0, or name a card with --gpu 24GiB",
            )
        return (seen[device],)
    if gpus is not None and seen:
        if gpus > len(seen):
            raise UserError(
                f"--gpus {gpus} asks for more than the {len(seen)} visible", next_step="Describe them with --gpu"
            )
        return seen[:gpus]
    return seen


def _path(source: Path | str) -> Path | Literal["-"]:
    return "-" if source == "-" else Path(source)


def _origin(source: Mapping[str, Any] | Path | str) -> str:
    if isinstance(source, Mapping):
        return "the arguments"
    return "standard input" if source == "-" else str(source)


def _enabled(env: Mapping[str, str], variable: str) -> bool:
    return env.get(variable, "").lower() in {"true", "y", "1"}
