"""Main memory under FSDP: weights on their way to the cards, what is offloaded, and the model as it is saved."""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.fsdp import FsdpPlan
from llamafactory_preflight.memory.build import ADAPTERS
from llamafactory_preflight.memory.host import PROCESS_BYTES, RANK_BYTES, HostNeed, workers_bytes
from llamafactory_preflight.memory.offload import ADAM_STATES, HostMemory
from llamafactory_preflight.memory.sharding import Ranks
from llamafactory_preflight.run import RunDescription


def fsdp_host(
    run: RunDescription, plan: FsdpPlan, shards: Sequence[tuple[int, bool]], ranks: Ranks, *, loaded: int
) -> HostNeed:
    """Main memory of all processes here.

    Args:
        run: The run.
        plan: FSDP's settings.
        shards: Bytes of each shard of a rank, and whether it is trained.
        ranks: Processes.
        loaded: Bytes of the whole model as LLaMA-Factory makes it.
    """
    process = PROCESS_BYTES + RANK_BYTES + workers_bytes(run)
    held = HostMemory()
    if plan.offloads:
        for size, trained in shards:
            held.pin(size)
            if trained:  # the gradient; version 1 has room for those of frozen parameters too
                held.pin(size)
                held.take(ADAM_STATES * size)
            elif plan.version == 1:
                held.pin(size)
    lasting = held.own + held.pinned
    # Weights that the other ranks only make room for are written to where they are cast to float32.
    cast = run.finetuning_type not in ADAPTERS
    waiting = loaded * (ranks.local if cast else 1) if plan.loads_once else 0
    training = ranks.local * process + max(waiting, ranks.local * lasting)
    return HostNeed(training=training, saving=ranks.local * (process + lasting) + loaded)
