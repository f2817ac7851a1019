"""The fastest settings with which a run fits, by a model of its cost; what is trained stays the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.fitting import judgement, speed
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import RunDescription


LEAST_GAIN = 1.05  # Less is within what the model of cost leaves out.
ASSUMED_LENGTHS = (256,)
PACKS_PER_STEP = 0.85, 1.15  # How far packing may move the number of samples of a step.


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The fastest settings found.

    Attributes:
        set: Arguments to change; none where the run is as fast as it gets.
        gain: How many times faster the step is expected to be.
        estimate: Memory with them.
    """

    set: Mapping[str, Any]
    gain: float
    estimate: MemoryEstimate


def tuned(result: Result, lengths: Sequence[int]) -> Tuned | None:
    """Tries every combination of settings that trains the same, and takes the fastest that fits.

    Args:
        result: The run as it is.
        lengths: Of its samples, in tokens; where they are not known, packing is left as it is.

    Returns:
        The fastest, or None where the run is not modelled or no combination fits.
    """
    if result.shape is None or result.device is None or result.estimate is None:
        return None
    shape, device, predict = result.shape, result.device, judgement.predictor(result)
    known = lengths or ASSUMED_LENGTHS

    def cost(changed: Mapping[str, Any]) -> float:
        return speed.seconds(dataclasses.replace(result.run, **changed), shape, known, device)

    as_given = cost({})
    fits_as_given = judgement.fits(result, result.estimate)
    for changed in sorted(candidates(result, lengths), key=cost):
        gain = as_given / cost(changed)
        if gain < LEAST_GAIN and fits_as_given:
            break
        try:
            estimate = predict(dataclasses.replace(result.run, **changed))
        except Unmodelled:
            continue
        if judgement.fits(result, estimate):
            return Tuned(set=changed, gain=gain, estimate=estimate)
    return Tuned(set={}, gain=1.0, estimate=result.estimate) if fits_as_given else None


def candidates(result: Result, lengths: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    """Changes that leave what is learnt alone: the samples of a step, their length and the precision."""
    run = result.run
    liger = [True] if run.enable_liger_kernel or _may_use_liger(result) else [False]
    checkpointing = [{"disable_gradient_checkpointing": value} for value in (True, False)]
    optim = [{"optim": "adamw_torch_fused"}] if run.optim == "adamw_torch" else [{}]
    for is_liger, kept, chosen, batching in product(liger, checkpointing, optim, _batchings(run, lengths)):
        wanted = {"enable_liger_kernel": is_liger, **kept, **chosen, **batching}
        if not wanted["disable_gradient_checkpointing"] and run.use_unsloth_gc:
            yield {**_differing(run, wanted), "use_unsloth_gc": False}
        if wanted["disable_gradient_checkpointing"] and run.gradient_checkpointing:
            continue  # the Trainer would turn it on again
        yield _differing(run, wanted)


def _batchings(run: RunDescription, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Divisions of a step's samples into micro-batches, and into packed sequences where as many samples result."""
    samples = run.per_device_train_batch_size * run.gradient_accumulation_steps
    for batch in (count for count in range(1, samples + 1) if samples % count == 0):
        yield {"per_device_train_batch_size": batch, "gradient_accumulation_steps": samples // batch}
    if run.packing or not lengths or run.stage != "sft":
        return
    mean = sum(min(length, run.cutoff_len) for length in lengths) / len(lengths)
    if run.cutoff_len < 2 * mean:
        return
    packs = samples * mean / (0.95 * run.cutoff_len)
    for count in {int(packs), int(packs) + 1} - {0}:
        if PACKS_PER_STEP[0] <= count / packs <= PACKS_PER_STEP[1]:
            for batch in (size for size in range(1, count + 1) if count % size == 0):
                yield {
                    "neat_packing": True, "packing": True, "per_device_train_batch_size": batch,
                    "gradient_accumulation_steps": count // batch,
                }  # fmt: skip


def _may_use_liger(result: Result) -> bool:
    assert result.shape is not None
    return result.shape.family.liger and result.software.liger_kernel is not None


def _differing(run: RunDescription, wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wanted.items() if getattr(run, name) != value}
