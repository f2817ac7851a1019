"""What of this machine takes part in a run: its GPUs, the processes that share them, and their allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llamafactory_preflight import device as cards
from llamafactory_preflight import memory
from llamafactory_preflight.advice import changes
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.machine import allocator
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.settings import Settings, is_enabled
from llamafactory_preflight.software import Software


MOST_GPUS = 4096
OTHER_CODE = {
    "USE_V1": "LLaMA-Factory v1",
    "USE_MCA": "Megatron",
}
"""Switches in the environment that put a run on code that no formula here follows."""


def refuse_other_code(env: Mapping[str, str]) -> None:
    """Raises where a switch in the environment has other code train.

    Raises:
        Unmodelled: There is one.
    """
    for variable, code in OTHER_CODE.items():
        if is_enabled(env, variable):
            raise Unmodelled(phrase("{code} ({variable}) has no formula yet", code=code, variable=variable))


def taking_part(planned: Device | None, *, device: int | None = None, gpus: int | None = None) -> tuple[Device, ...]:
    """The GPUs of a run: as many planned ones as asked for, or those of this machine.

    Raises:
        UserError: There are no such GPUs.
    """
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
                f"--device {device} does not exist; visible GPUs: {len(seen)}",
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


def card_of(decisive: Device | None, *, num_gpus: int, env: Mapping[str, str]) -> memory.Card:
    """What the estimate asks of the card, and of the allocator as the training process will find it configured."""
    torchrun = num_gpus > 1 or is_enabled(env, "FORCE_TORCHRUN")
    hooked = Settings.from_environment(env).mode != "off"
    card = memory.Card(expandable_segments=allocator.expands(env, torchrun=torchrun, hooked=hooked))
    capability = decisive.compute_capability if decisive else None
    return card if capability is None else replace(card, compute_capability=capability)


def ranks_of(num_gpus: int, *, env: Mapping[str, str]) -> memory.Ranks:
    """How many processes train together: torchrun tells its own, else one for each GPU of each of `NNODES` hosts."""
    given = {name: env.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES")}
    count = {name: int(value) for name, value in given.items() if value.isdigit() and int(value) > 0}
    local = count.get("LOCAL_WORLD_SIZE", count.get("NPROC_PER_NODE", max(num_gpus, 1)))
    return memory.Ranks(world=count.get("WORLD_SIZE", local * count.get("NNODES", 1)), local=local)


def deepspeed_files(software: Software, num_gpus: int, *, env: Mapping[str, str]) -> tuple[changes.DeepSpeedFile, ...]:
    """The pack's DeepSpeed files, where torchrun starts the run: LLaMA-Factory takes none elsewhere."""
    torchrun = ranks_of(num_gpus, env=env).world > 1 or is_enabled(env, "FORCE_TORCHRUN")
    return changes.deepspeed_files(paths.pack_folder()) if torchrun and software.deepspeed is not None else ()
