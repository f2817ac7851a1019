"""Main memory: what a run takes, what a container leaves of it, and what may be locked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamafactory_preflight.machine.host import MainMemory
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.phrases import joined, phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


OVERSUBSCRIBED = 2
KILLED = "The container or job allows {limit} in all: the process would be killed."
INFINIBAND = Path("/sys/class/infiniband")


def host_memory(
    estimate: MemoryEstimate | None, budget_bytes: int | None, here: MainMemory | None = None
) -> Iterator[Finding]:
    """Main memory is a second budget; its estimate is rough, so this is never more than a warning.

    Args:
        estimate: The prediction, if there is one.
        budget_bytes: What is available, or planned for.
        here: What this machine has, unless another is planned for.
    """
    exceeds = estimate is not None and budget_bytes is not None and estimate.host_bytes > budget_bytes
    limit = here.limit_bytes if here is not None else None
    if exceeds:
        assert estimate is not None and budget_bytes is not None
        message = "The run may take {wanted} of main memory, and {available} are available."
        yield Finding(
            id="host-memory",
            severity="warning",
            message=message if limit is None else joined(" ", (message, KILLED)),
            amounts={"wanted": estimate.host_bytes, "available": budget_bytes} | ({"limit": limit} if limit else {}),
        )
    elif here is not None and limit is not None and limit < here.total_bytes and _is_near(estimate, here):
        yield Finding(
            id="host-limited",
            severity="info",
            message="This container or job may use {limit} of the machine's {total} of main memory, and {available} "
            "are left of that; free and top show the machine's.",
            amounts={"limit": limit, "total": here.total_bytes, "available": here.available_bytes},
        )


def workers(run: RunDescription, *, cores: int | None = None) -> Iterator[Finding]:
    """Each worker of the preprocessing is a process with a tokenizer and a part of the data of its own."""
    here = cores or available_cores()
    if run.preprocessing_num_workers is not None and run.preprocessing_num_workers > OVERSUBSCRIBED * here:
        yield Finding(
            id="many-workers",
            severity="warning",
            message=phrase(
                "preprocessing_num_workers={num} starts more processes than the {cores} cores here can use, and each "
                "takes main memory.",
                num=run.preprocessing_num_workers,
                cores=here,
            ),
            set={"preprocessing_num_workers": here},
        )


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_near(estimate: MemoryEstimate | None, here: MainMemory) -> bool:
    return estimate is None or 2 * estimate.host_bytes > here.available_bytes


def locked_memory(environ: Mapping[str, str], *, infiniband: Path = INFINIBAND) -> Iterator[Finding]:
    """InfiniBand registers memory against the limit of locked memory, and NCCL fails on a small one.

    CUDA's pinned memory, and so DeepSpeed's pinned offload, does not count against that limit.
    """
    nodes = environ.get("NNODES", "1").rpartition(":")[2]
    if not nodes.isdigit() or int(nodes) < 2:
        return
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        has_adapter = any(infiniband.iterdir())
    except (ImportError, OSError):  # Windows has no such limit
        return
    if has_adapter and limit != resource.RLIM_INFINITY:
        yield Finding(
            id="memlock",
            severity="warning",
            message="This shell may lock {limit} of memory, and NCCL over InfiniBand needs much more. Run it under "
            "`ulimit -l unlimited` (containers: --ulimit memlock=-1).",
            amounts={"limit": limit},
        )
