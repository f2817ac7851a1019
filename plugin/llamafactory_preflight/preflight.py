"""Puts a preflight together: arguments, model, machine, estimate, verdict; without torch or LLaMA-Factory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments, findings, memory, simulate, verdict
from llamafactory_preflight import device as cards
from llamafactory_preflight.advice import contradictions
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.data import media
from llamafactory_preflight.data.images import Counted, Images, Source
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.fitting import judgement
from llamafactory_preflight.machine import checkpoint_size, disk, host, survey
from llamafactory_preflight.model import config as model_config
from llamafactory_preflight.model import hub
from llamafactory_preflight.model.shape import FAMILIES, ModelShape
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import from_arguments
from llamafactory_preflight.settings import GPU_VARIABLE, Settings, is_enabled
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import parse_memory


def check(
    source: Mapping[str, Any] | Path | str,
    *,
    overrides: Sequence[str] = (),
    gpu: str | None = None,
    free: str | None = None,
    device: int | None = None,
    gpus: int | None = None,
    host_ram: str | None = None,
    exact: bool = False,
    accelerate_config: Path | None = None,
) -> Result:
    """Tells what a training run will take and whether it fits, without loading anything.

    Args:
        source: LLaMA-Factory arguments by name, or the path of a YAML or JSON file, or `-` for standard input.
        overrides: `key=value` items that win over the file, as on LLaMA-Factory's command line.
        gpu: A card to plan for: all its memory as torch reports it (`24GiB`; GB means GiB), the CUDA context included,
            or its name (`rtx4090`). Without it, `free` and `device`: what LLAMAFACTORY_PREFLIGHT_GPU names.
        free: What the allocator may use on that card, context already left out (`21.5GiB`).
        device: Which visible GPU to look at; by default all, and the one with the least free memory decides.
        gpus: How many GPUs take part; by default all visible ones, or one for a planned card.
        host_ram: Main memory to plan for (`64GiB`); by default what is available here.
        exact: Simulate the run with the installed packages: some seconds, for any architecture that they know.
        accelerate_config: The file that `accelerate launch --config_file` gets, which may ask for FSDP.

    Returns:
        The prediction in bytes, the verdict and the findings. The verdict is `unknown` where the run is not modelled.

    Raises:
        UserError: A file, an argument or an amount is faulty, or there is neither a GPU nor one to plan for.
    """
    origin = _origin(source)
    file = "-" if isinstance(source, Mapping) or source == "-" else Path(source)
    given = dict(source) if isinstance(source, Mapping) else arguments.read(file, overrides)
    if isinstance(source, Mapping) and overrides:
        raise UserError("Overrides go with a file, not with a mapping")
    planned = cards.planned(gpu=gpu, free=free)
    if planned is None and device is None:
        planned = cards.planned(gpu=Settings.from_environment().gpu, where=GPU_VARIABLE)
    devices = survey.taking_part(planned, device=device, gpus=gpus)
    beside = Path(origin).resolve().parent if origin.endswith(arguments.CONFIG_SUFFIXES) else None
    result = examine(
        given,
        origin=origin,
        beside=beside,
        devices=devices,
        host_budget_bytes=parse_memory(host_ram, where="--host-ram") if host_ram else host.available_bytes(),
        here=None if host_ram else host.main_memory(),
        exact=exact,
        launcher=fsdp.from_file(accelerate_config),
        overridden=arguments.overridden(overrides),
        trains=False,
    )
    if result.device is None and not (result.run.use_cpu or (result.serves and result.run.merges_on_cpu)):
        raise UserError(
            cards.survey().fault or "There is no GPU here to plan for",
            next_step="Name a card with --gpu 24GiB, or set use_cpu=true",
        )
    return result


def examine(
    given: Mapping[str, Any],
    *,
    origin: str,
    beside: Path | None,
    devices: tuple[Device, ...],
    host_budget_bytes: int | None,
    here: host.MainMemory | None = None,
    environ: Mapping[str, str] | None = None,
    exact: bool = False,
    length: int | None = None,
    eval_length: int | None = None,
    count_images: Callable[[int], Counted | None] | None = None,
    launcher: Mapping[str, str] | None = None,
    num_samples: int | None = None,
    overridden: frozenset[str] = frozenset(),
    trains: bool = True,
    proposes: bool = True,
    find: Callable[..., hub.ModelSource] = hub.find,
) -> Result:
    """Looks at one run on given devices; without any, as a run on the CPU.

    `here` is this machine's main memory, unless another is planned for. `length` and `eval_length` are those of the
    longest samples, once they are known; until then the cutoff. `count_images` looks for a token in the data.
    `num_samples` are those of one process's training set, where its last batch may be smaller than the others.
    `overridden` names the arguments that were given beside the file `origin`. `launcher` holds what `accelerate
    launch` would set, where the environment does not. Without `trains` the arguments may be those of `chat`, `api` or
    `export`. Without `proposes` no remedies are sought. `find` finds the model.

    Raises:
        UserError: An argument is faulty.
    """
    env = os.environ if environ is None else environ
    software = Software.installed()
    resolved_arguments, resolved = paths.resolve(given, beside=beside)
    run = from_arguments(
        resolved_arguments,
        software=software,
        origin=origin,
        overridden=overridden,
        allow_extra=is_enabled(env, "ALLOW_EXTRA_ARGS"),
    )
    run = replace(run, accelerate=fsdp.launched_with(env) if launcher is None else launcher)
    if num_samples:
        run = replace(run, per_device_train_batch_size=min(run.per_device_train_batch_size, num_samples))
    serves = not trains and run.serves
    contradictions.refuse(run, serves=serves)
    # LLaMA-Factory falls back to the CPU where there is no GPU, and then main memory holds everything.
    on_cpu = run.use_cpu or not devices or (serves and run.merges_on_cpu)
    decisive = None if on_cpu else cards.smallest(devices)
    shape: ModelShape | None = None
    estimate: memory.MemoryEstimate | None = None
    writes: list[disk.Need] = [*disk.data(run, env)]
    checkpoint: checkpoint_size.Checkpoint | None = None
    model_type = ""
    source: Source | None = None
    pictures: Images | None = None
    try:
        assert run.model_name_or_path is not None
        model = find(run.model_name_or_path, revision=run.model_revision, cache_dir=run.cache_dir, environ=env)
        writes += disk.weights(model)
        resolved += (model.note,) if model.note else ()
        if given.get("trust_remote_code") and model.config.get("auto_map"):
            raise Unmodelled("The checkpoint brings code of its own, and `trust_remote_code` has it run")
        model_type = str(model.config.get("model_type"))
        family = FAMILIES.get(model_type)
        if family is not None:
            model_config.check(model.config, place=model.place, moe=family.moe)
        source = None if serves else media.source(resolved_arguments, run, model.config, count_images)
        card, placed = survey.card_of(decisive, num_gpus=len(devices), env=env), replace(run, use_cpu=on_cpu)
        ranks = memory.Ranks() if on_cpu else survey.ranks_of(len(devices), env=env)
        if not (serves or run.do_train) and (run.do_eval or run.do_predict):
            raise Unmodelled("An evaluation or a prediction without training has no formula yet")
        survey.refuse_other_code(env)
        pictures = source.of(placed, length) if source is not None else None
        if exact and serves:
            raise Unmodelled("--exact simulates trainings, and these are the arguments of a chat, an API or an export")
        if exact and (ranks.world > 1 or run.deepspeed is not None or run.fsdp_plan is not None):
            raise Unmodelled("--exact simulates one process without DeepSpeed or FSDP; the formula knows several")
        if exact:
            estimate = simulate.estimate(
                placed, model.config, software=software, card=card, length=length, images=pictures
            )
        else:
            shape = _shape(model.config)
            contradictions.refuse_model(run, shape, serves=serves)
            checkpoint = checkpoint_size.of_shape(run, shape, software=software)
            if serves:
                estimate = memory.inference_estimate(placed, shape, software=software, card=card)
            else:
                estimate = memory.estimate(
                    placed,
                    shape,
                    software=software,
                    card=card,
                    length=length,
                    eval_length=eval_length,
                    ranks=ranks,
                    images=pictures,
                )
                writes += disk.offloaded(placed, shape, ranks)
        if decisive is not None and decisive.kind != "cuda":
            estimate = verdict.widened(estimate)
        answer = judgement.judge_with_host(estimate, decisive, host_budget_bytes)
        checkpoint = checkpoint or checkpoint_size.of_estimate(run, estimate)
    except Unmodelled as error:
        answer = verdict.unknown(phrase("{sentence}.", sentence=error.reason))
    if checkpoint is not None:
        writes += disk.checkpoints(run, checkpoint)
    result = Result(
        origin=origin,
        run=run,
        software=software,
        shape=shape,
        estimate=estimate,
        device=decisive,
        devices=() if on_cpu else devices,
        host_budget_bytes=host_budget_bytes,
        verdict=answer,
        findings=(),
        resolved=resolved,
        images=source,
        serves=serves,
    )
    if proposes and not serves:
        result = replace(result, remedies=judgement.proposed(result, length=length, eval_length=eval_length, env=env))
    surroundings = findings.Surroundings(
        environ=env,
        num_gpus=len(devices),
        model_type=model_type,
        here=here,
        fault=None if devices or run.use_cpu else cards.survey(env).fault,
        writes=tuple(writes),
        checkpoint=checkpoint,
        images=pictures,
        trains=trains,
    )
    return replace(result, findings=findings.about(result, surroundings))


def _shape(config: Mapping[str, Any]) -> ModelShape:
    try:
        return ModelShape.from_config(config)
    except Unmodelled as error:
        raise Unmodelled(
            phrase("{reason}. `llamafactory-cli preflight --exact` may know it", reason=error.reason)
        ) from None


def _origin(source: Mapping[str, Any] | Path | str) -> str:
    if isinstance(source, Mapping):
        return "the arguments"
    return "standard input" if source == "-" else str(source)
