"""Main memory of a run's processes on this machine: what they cannot do without, and what shows as resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.build import ADAPTERS
from llamafactory_preflight.memory.checkpointing import checkpointing_kind
from llamafactory_preflight.memory.offload import HostMemory, zero2_host, zero3_host
from llamafactory_preflight.memory.optimizers import BITSANDBYTES
from llamafactory_preflight.memory.sharding import Parameter, Ranks
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.zero import ZeroPlan


PROCESS_BYTES = int(1.15 * 2**30)
"""Resident size of a process with torch, CUDA and transformers, without mapped files (1.15 GiB measured)."""
DEEPSPEED_BYTES = int(0.9 * 2**30)
"""What DeepSpeed, its CPU optimizer and NCCL add to a process (0.9 and 1.9 GiB left over in two measured runs)."""
WORKER_BYTES = int(0.35 * 2**30)
"""What a forked worker of the data loader or the tokenization holds for itself: pages that it wrote to."""


def host_bytes(run: RunDescription, *, trained: int, num_trained: int, weights: int, inputs: int, peak: int) -> int:
    """Main memory of one process at its height.

    Args:
        run: The run.
        trained: Bytes of what is trained.
        num_trained: Elements of what is trained.
        weights: Bytes of the base model as it lies on the card.
        inputs: Bytes of the inputs of all layers in a micro-batch.
        peak: Peak on the card, which is main memory for a run on the CPU.
    """
    if run.use_cpu:
        return PROCESS_BYTES + peak + _workers(run)
    saved = trained if run.finetuning_type in ADAPTERS else weights  # copied from the card to be written
    moved = inputs if checkpointing_kind(run) == "host" else 0
    return PROCESS_BYTES + max(saved, moved) + _paged_states(run, num_trained) + _workers(run)


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
    ranks: Ranks,
    *,
    item: int,
    inputs: int,
    state_dict: int,
) -> HostNeed:
    """Main memory under DeepSpeed.

    Below stage 3 every rank copies the whole state dict to main memory to save it, the base of an adapter included and
    tied weights twice (accelerate.Accelerator.get_state_dict); under stage 3 the first rank collects what is written.

    Args:
        run: The run.
        plan: DeepSpeed's settings.
        everything: All parameters.
        groups: What is trained, in the optimizer's groups.
        ranks: Processes.
        item: Bytes of an element of the model.
        inputs: Bytes of the inputs of all layers in a micro-batch.
        state_dict: Bytes of the whole state dict on one card.
    """
    training = saving = 0
    adapters = run.finetuning_type in ADAPTERS
    written = sum(parameter.numel * item for parameter in everything if parameter.trained or not adapters)
    moved = inputs if checkpointing_kind(run) == "host" else 0
    for rank in range(ranks.local):
        if plan.stage == 3:
            held = zero3_host(everything, groups, plan, world=ranks.world, item=item)
            saved = written if rank == 0 and (plan.gather_on_save or adapters) else 0
        elif plan.stage == 0:
            held, saved = HostMemory(), state_dict
        else:
            accumulates = run.gradient_accumulation_steps > 1
            held = zero2_host(groups, plan, world=ranks.world, rank=rank, item=item, accumulates=accumulates)
            saved = state_dict
        process, lasting = PROCESS_BYTES + DEEPSPEED_BYTES + _workers(run), held.own + held.pinned
        training += process + max(held.peak, lasting + moved)
        saving += process + lasting + saved
    return HostNeed(training=training, saving=saving)


def _workers(run: RunDescription) -> int:
    """Workers of the data loader live beside the training; those of the tokenization are gone by then."""
    return run.dataloader_num_workers * WORKER_BYTES


def _paged_states(run: RunDescription, num_trained: int) -> int:
    kind = BITSANDBYTES.get(run.optim or "")
    if kind is None or not kind.paged:
        return 0
    return num_trained * kind.states * kind.bits // 8


def host_remarks(run: RunDescription) -> Iterator[str]:
    """What else will show up as the process's memory."""
    if not run.use_cpu:
        yield "While weights load, their files are mapped: as much shows as resident too, but the system can drop it."
