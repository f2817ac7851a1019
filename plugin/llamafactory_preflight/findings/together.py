"""Asks every check about one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llamafactory_preflight import verdict
from llamafactory_preflight.data.images import Images
from llamafactory_preflight.findings import (
    arguments,
    data_rows,
    disk,
    hardware,
    host,
    names,
    nvme,
    packages,
    starting,
    values,
    vision,
)
from llamafactory_preflight.machine.checkpoint_size import Checkpoint
from llamafactory_preflight.machine.disk import Need
from llamafactory_preflight.machine.host import MainMemory
from llamafactory_preflight.machine.survey import ranks_of
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.settings import is_enabled


SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a check may look at besides the result.

    Attributes:
        environ: Environment variables.
        num_gpus: Devices that are visible or planned for, also where the run stays on the CPU.
        model_type: The model's, or an empty string.
        here: This machine's main memory, unless another is planned for.
        fault: Why a device that is there cannot be used.
        writes: What the run writes to disk.
        checkpoint: The size of a checkpoint, if it is known.
        images: The images of a sample that were counted with.
        trains: The run starts here and now.
    """

    environ: Mapping[str, str]
    num_gpus: int
    model_type: str = ""
    here: MainMemory | None = None
    fault: str | None = None
    writes: tuple[Need, ...] = ()
    checkpoint: Checkpoint | None = None
    images: Images | None = None
    trains: bool = True


def about(result: Result, around: Surroundings) -> tuple[Finding, ...]:
    """All findings, the most severe first."""
    return tuple(sorted(_all(result, around), key=lambda finding: SEVERITIES.index(finding.severity)))


def _all(result: Result, around: Surroundings) -> Iterator[Finding]:
    run, software, estimate, device = result.run, result.software, result.estimate, result.device
    has_experts = result.shape is not None and result.shape.moe is not None
    yield from names.template(run)
    starts_here = around.trains and not is_enabled(around.environ, "USE_RAY")
    if not result.serves:
        yield from names.data_sets(run, trains=starts_here)
        yield from data_rows.data_rows(run, trains=starts_here)
        yield from starting.adapters(run, trains=starts_here)
        yield from starting.checkpoint(run, trains=starts_here and not is_enabled(around.environ, "USE_MCA"))
        yield from values.samples(run)
        yield from values.quantization(run, result.shape)
        yield from values.adapter(run, result.shape)
        yield from values.reports(run)
        yield from arguments.low_rank_optimizer(run)
    yield from vision.images(result, around.images)
    if starts_here:
        yield from disk.output_folder(run)
    yield from disk.disk_space(run, around.writes, around.checkpoint)
    yield from host.host_memory(estimate, result.host_budget_bytes, around.here)
    yield from host.locked_memory(around.environ)
    yield from host.workers(run)
    yield from arguments.launch(run, origin=result.origin, num_gpus=around.num_gpus, environ=around.environ)
    yield from arguments.json_file(result.origin, software)
    yield from arguments.checkpointing(run)
    yield from arguments.checkpointing_of_shards(run, software)
    yield from arguments.evaluation(run, estimate)
    yield from arguments.experts(run, has_experts=has_experts, software=software)
    yield from arguments.flash_attention_3(run, model_type=around.model_type, software=software)
    yield from arguments.eager_attention(run)
    yield from packages.bad_pairs(software, run)
    yield from packages.missing_packages(run, software, device)
    yield from packages.missing_libaio(run)
    world = ranks_of(around.num_gpus, env=around.environ).world
    yield from nvme.settings(run, result.shape, world=world)
    yield from hardware.unusable(around.fault)
    if device is not None:
        fits = result.verdict.word == "fits"
        if estimate is not None and not fits and not result.serves:
            yield from packages.would_help(run, software, model_type=around.model_type, num_gpus=around.num_gpus)
        yield from hardware.card(run, device, software, fits=fits)
        if estimate is not None:
            high = verdict.need_bounds(estimate, context_bytes=device.context_bytes)[1]
            yield from hardware.as_sold(device, high)
        yield from hardware.windows(run, fits=fits, environ=around.environ)
