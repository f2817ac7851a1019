"""Main memory under FSDP: weights on their way to the cards, what is offloaded, and the model as it is saved."""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.memory.host import PROCESS_BYTES, RANK_BYTES, HostNeed, workers_bytes
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.sharding import Ranks
from llamafactory_preflight.memory.zero.offload import ADAM_STATES, HostMemory
from llamafactory_preflight.parallel.fsdp import FsdpPlan
from llamafactory_preflight.run import RunDescription


def fsdp_host(
    run: RunDescription, plan: FsdpPlan, shards: Sequence[tuple[int, bool]], ranks: Ranks, *, loaded: int, trained: int
) -> HostNeed:
    """Main memory of all processes here.

    Args:
        run: The run.
        plan: FSDP's settings.
        shards: Bytes of each shard of a rank, and whether it is trained.
        ranks: Processes.
        loaded: Bytes of the whole model as LLaMA-Factory makes it.
        trained: Bytes of what is trained of it. Adapters are made in main memory, in pieces so small that the C
            library keeps their room (0.1 to 0.4 GiB beyond the processes in four measured runs).
    """
    adapters = run.finetuning_type in ADAPTERS
    process = PROCESS_BYTES + RANK_BYTES + workers_bytes(run) + (trained if adapters else 0)
    held = HostMemory()
    if plan.offloads:
        for size, is_trained in shards:
            held.pin(size)
            if is_trained:  # the gradient; version 1 has room for those of frozen parameters too
                held.pin(size)
                held.take(ADAM_STATES * size)
            elif plan.version == 1:
                held.pin(size)
    lasting = held.own + held.pinned
    # Weights wait there for their cards. Frozen ones are mapped files or room that nobody writes to; what is trained
    # is cast to float32 in every process, before NCCL is there.
    casts = plan.loads_once and not adapters
    loading = ranks.local * (PROCESS_BYTES + loaded) if casts else 0
    training = max(loading, ranks.local * (process + lasting))
    return HostNeed(training=training, saving=ranks.local * (process + lasting) + loaded)
