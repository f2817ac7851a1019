"""How many processes a run starts, as LLaMA-Factory's launcher and torchrun tell through the environment."""

from __future__ import annotations

from collections.abc import Mapping

from llamafactory_preflight.memory import Ranks


def ranks(num_gpus: int, *, env: Mapping[str, str]) -> Ranks:
    """The ranks of a run: as torchrun tells them, else one for each GPU on each of `NNODES` machines."""
    given = {name: env.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES")}
    count = {name: int(value) for name, value in given.items() if value.isdigit() and int(value) > 0}
    local = count.get("LOCAL_WORLD_SIZE", count.get("NPROC_PER_NODE", max(num_gpus, 1)))
    return Ranks(world=count.get("WORLD_SIZE", local * count.get("NNODES", 1)), local=local)
