"""Main memory of a run's processes on this machine: what they cannot do without, and what shows as resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.layers.checkpointing import checkpointing_kind
from llamafactory_preflight.memory.optimizers import BITSANDBYTES
from llamafactory_preflight.memory.sharding import Parameter, Ranks
from llamafactory_preflight.memory.zero.offload import HostMemory, zero2_host, zero3_host
from llamafactory_preflight.memory.zero.swapped import Swapping, swapped_host
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription


PROCESS_BYTES = int(1.15 * 2**30)
"""A process with torch, CUDA and transformers, without mapped files: 1.15 GiB on one GPU, and 0.6 to 1.2 GiB in five
runs of one and two ranks while DeepSpeed laid out parameters."""
RANK_BYTES = int(0.4 * 2**30)
"""What NCCL, its threads and its shared memory add to a rank (0.38 to 0.47 GiB in three measured runs)."""
DEEPSPEED_BYTES = int(0.6 * 2**30)
"""What DeepSpeed adds to a process, NCCL included: 0.54 GiB in a measured run of one rank, 0.61 to 0.71 GiB a rank in
four runs of two."""
WORKER_BYTES = int(0.35 * 2**30)
"""What a forked worker of the data loader or the tokenization holds for itself: pages that it wrote to."""


def host_bytes(
    run: RunDescription,
    *,
    trained: int,
    num_trained: int,
    weights: int,
    inputs: int,
    peak: int,
    together: bool = False,
) -> int:
    """Main memory of one process at its height: its own, shared and page-locked pages, but no mapped files.

    Args:
        run: The run.
        trained: Bytes of what is trained.
        num_trained: Elements of what is trained.
        weights: Bytes of the base model as it lies on the card.
        inputs: Bytes of the inputs of all layers in a micro-batch.
        peak: Peak on the card, which is main memory for a run on the CPU.
        together: Whether the process trains together with others.
    """
    process = PROCESS_BYTES + together * RANK_BYTES + workers_bytes(run)
    if run.use_cpu:
        return process + peak
    saved = trained if run.finetuning_type in ADAPTERS else weights  # copied from the card to be written
    moved = inputs if checkpointing_kind(run) == "host" else 0
    return process + max(saved, moved) + _paged_states(run, num_trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeed:
    """Main memory of all processes here: while they train, and while the model is saved at the end."""

    training: int
    saving: int


def deepspeed_host(
    run: RunDescription,
    plan: ZeroPlan,
    everything: Sequence[Parameter],
    groups: Sequence[Sequence[Parameter]],
    copied: Sequence[Parameter],
    ranks: Ranks,
    *,
    item: int,
    inputs: int,
    state_dict: int,
    tied: int,
    converted: int,
) -> HostNeed:
    """Main memory under DeepSpeed.

    Below stage 3 every rank copies the whole state dict to main memory to save it, the base of an adapter included and
    tied weights twice (accelerate.Accelerator.get_state_dict); under stage 3 the first rank collects what is written.

    Args:
        run: The run.
        plan: DeepSpeed's settings.
        everything: All parameters.
        groups: What is trained, in the optimizer's groups.
        copied: The parameters of a second model.
        ranks: Processes.
        item: Bytes of an element of the model.
        inputs: Bytes of the inputs of all layers in a micro-batch.
        state_dict: Bytes of the whole state dict on one card.
        tied: Elements of a head that is the embedding, 0 where it is not.
        converted: Bytes of experts that a rank makes new while it loads them.
    """
    training = saving = 0
    adapters = run.finetuning_type in ADAPTERS
    written = sum(parameter.numel * item for parameter in everything if parameter.trained or not adapters)
    moved = inputs if checkpointing_kind(run) == "host" else 0
    for rank in range(ranks.local):
        if plan.stage == 3:
            sharing = Swapping(
                everything=everything,
                groups=groups,
                copied=copied,
                plan=plan,
                world=ranks.world,
                item=item,
                tied=tied,
                converted=converted,
            )
            held = swapped_host(sharing) if plan.swaps else zero3_host(sharing)
            saved = written if rank == 0 and (plan.gather_on_save or adapters) else 0
        elif plan.stage == 0:
            held, saved = HostMemory(), state_dict
        else:
            accumulates = run.gradient_accumulation_steps > 1
            held = zero2_host(groups, plan, world=ranks.world, rank=rank, item=item, accumulates=accumulates)
            saved = state_dict
        process, lasting = PROCESS_BYTES + DEEPSPEED_BYTES + workers_bytes(run), held.own + held.pinned
        training += max(PROCESS_BYTES + held.peak, process + lasting + max(moved, held.passing))
        saving += process + lasting + saved
    return HostNeed(training=training, saving=saving)


def workers_bytes(run: RunDescription) -> int:
    """Workers of the data loader live beside the training; those of the tokenization are gone by then."""
    return run.dataloader_num_workers * WORKER_BYTES


def preprocessing_bytes(run: RunDescription, ranks: Ranks) -> int:
    """All processes here while one of them tokenizes with its workers, before any weights load."""
    workers = 0 if run.streaming else run.preprocessing_num_workers or 0
    return PROCESS_BYTES * ranks.local + workers * WORKER_BYTES


def _paged_states(run: RunDescription, num_trained: int) -> int:
    kind = BITSANDBYTES.get(run.optim or "")
    if kind is None or not kind.paged:
        return 0
    return num_trained * kind.states * kind.bits // 8


def host_remarks(run: RunDescription) -> Iterator[str]:
    """What else will show up as the process's memory."""
    if not run.use_cpu:
        yield "While weights load, their files are mapped: as much shows as resident too, but the system can drop it."
