"""What to say when memory has run out: what happened, why it differs from the prediction, and what to do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

from llamafactory_preflight import report, verdict
from llamafactory_preflight.advice import remedies
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.device.processes import name_of
from llamafactory_preflight.fitting import judgement
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.report import size
from llamafactory_preflight.result import Result
from llamafactory_preflight.units import MIB
from llamafactory_preflight.watch.shortage import Shortage
from llamafactory_preflight.watch.state import WORDS, State


NOTABLE_BYTES = 64 * MIB
NOTABLE_SHARE = 0.02
MOST_NEIGHBOURS = 3
HOST_REMEDIES = {
    "data": ("preprocessing_num_workers=1", "streaming=true (with max_steps)", "tokenized_path=..., made once"),
    "load": ("fewer processes: NPROC_PER_NODE", "quantization_bit=4, for adapters"),
    "forward_backward": ("use_unsloth_gc=false", "dataloader_num_workers=0", "an optimizer that is not offloaded"),
    "optimizer_step": ("an optimizer that is neither offloaded nor paged", "more GPUs for the same offload"),
    "evaluate": ("per_device_eval_batch_size=1", "dataloader_num_workers=0", "a smaller val_size"),
    "save": ("save_only_model=true", "stage3_gather_16bit_weights_on_model_save: false in the DeepSpeed file"),
}
CAUSES = {
    "cgroup": "The kernel has killed in this container since then because its memory limit was reached.",
    "machine": "The kernel has killed on this machine since then because main memory ran out.",
    "nowhere": "The kernel has not killed for want of memory since then, so something else ended it: a `kill`, the "
    "time limit of a job, or a crash.",
    "restart": "The machine has been started anew since then.",
    "unknown": "Main memory that ran out is the usual reason; `dmesg` or the job's log may tell.",
}
KILLED_EARLY = (
    "llamafactory-preflight: a process was killed by the kernel because main memory ran out, before it had begun.\n"
    "  What lowers it:\n    fewer processes: NPROC_PER_NODE"
)
PINNED_REMEDIES = ("dataloader_pin_memory=false", "pin_memory: false in the DeepSpeed file", "ulimit -l unlimited")


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The component that took most beyond its prediction."""

    name: str
    predicted: int
    measured: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One process that ran out.

    Attributes:
        shortage: What the message told.
        state: What was measured until then.
        phase: What was going on.
        result: A preflight for the batch that failed, or None.
        budget_bytes: What this process could have in all: of the card with its CUDA context, or of main memory.
        room_bytes: What it can still have of main memory.
        length: Tokens of the longest sample that the remedies must hold for, or None for the cutoff.
        eval_length: The same for what is evaluated.
        output_dir: Of the run.
    """

    shortage: Shortage
    state: State
    phase: str
    result: Result | None
    budget_bytes: int | None
    room_bytes: int | None
    length: int | None
    eval_length: int | None
    output_dir: str | None


def on_gpu(case: Case) -> str:
    """The text for a card that ran out."""
    lines = wrapped(_head("GPU memory", case.state, case.phase))
    lines += wrapped(" ".join(_card(case.shortage, case.result)), indent="  ")
    if case.result is not None and case.result.estimate is not None:
        sentences = _against_prediction(case.shortage, case.state, case.result.estimate, case.phase)
        lines += wrapped(" ".join(sentences), indent="  ")
    proposed = _remedies(case)
    lines += report.remedy_lines(proposed)
    if not proposed:
        lines += wrapped("No change is known with which it would fit here.", indent="  ")
    lines += wrapped(resume(case.output_dir, proposed[0].line if proposed else ""), indent="  ")
    return "\n".join(lines)


def on_host(case: Case) -> str:
    """The text for main memory that ran out, page-locked or not."""
    pinned = case.shortage.where == "pinned"
    lines = wrapped(_head("page-locked main memory" if pinned else "main memory", case.state, case.phase))
    asked = f"Asked for {size(case.shortage.asked)}; " if case.shortage.asked else ""
    lines += wrapped(f"{asked}{size(case.room_bytes)} are available to this process now.", indent="  ")
    proposed = () if pinned or case.state.on_gpu else _remedies(case)
    lines += report.remedy_lines(proposed)
    if not proposed:
        lines += _list(PINNED_REMEDIES if pinned else HOST_REMEDIES[case.phase])
    lines += wrapped(resume(case.output_dir, proposed[0].line if proposed else ""), indent="  ")
    return "\n".join(lines)


def killed(beat: Mapping[str, object], *, cause: str, output_dir: str) -> str:
    """The text for a process that ended without a word, from what it last wrote; `cause` is one of `CAUSES`."""
    phase = str(beat.get("phase"))
    step = _at(phase, _int(beat, "step"))
    why = CAUSES[cause]
    head = f"llamafactory-preflight: rank {beat.get('rank')} ended without a word {WORDS.get(phase, '')}{step}. {why}"
    had, left = size(_int(beat, "rss_bytes")), size(_int(beat, "host_available_bytes"))
    seen = f"It last had {had} of main memory, and {left} were left."
    lines = [*wrapped(head), *wrapped(seen, indent="  ")]
    lines += [] if cause in ("nowhere", "restart") else _list(HOST_REMEDIES.get(phase, ()))
    lines += wrapped(resume(output_dir, ""), indent="  ")
    return "\n".join(lines)


def resume(output_dir: str | None, change: str) -> str:
    """From which checkpoint to go on, and how."""
    states = Path(output_dir or "").glob("checkpoint-*/trainer_state.json")  # which is written last
    found = [state.parent for state in states if state.parent.name[11:].isdigit()]
    if not output_dir or not found:
        return "No checkpoint was completed yet: the run begins anew."
    last = max(found, key=lambda folder: int(folder.name[11:]))
    added = f"{shlex.quote(f'resume_from_checkpoint={last}')} {change}".strip()
    return f"The last checkpoint is {last.name}. To go on from it add: {added}"


def growth(shortage: Shortage, state: State, estimate: MemoryEstimate, phase: str) -> Growth | None:
    """The component that grew most beyond the prediction, or None where none did notably."""
    parts = estimate.components
    fixed = parts["weights"] + parts["adapters"]
    resting = fixed + parts["optimizer"] + parts["buffers"]
    found: list[Growth] = []
    held = state.held_bytes.get("steps", state.held_bytes.get("load"))
    if "load" in state.held_bytes:
        found.append(Growth(name="weights and adapters", predicted=fixed, measured=state.held_bytes["load"]))
    if "steps" in state.held_bytes:
        states = state.held_bytes["steps"] - state.held_bytes.get("load", fixed)
        found.append(Growth(name="optimizer states", predicted=resting - fixed, measured=states))
    if held is not None and shortage.allocated is not None and phase == "forward_backward":
        moving = parts["gradients"] + parts["activations"] + parts["logits"]
        reached = shortage.allocated + (shortage.asked or 0) - held
        found.append(Growth(name="activations, gradients and logits", predicted=moving, measured=reached))
    grown = [one for one in found if one.measured - one.predicted > _notable(estimate)]
    return max(grown, key=lambda one: one.measured - one.predicted, default=None)


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """Lines of at most 80 columns; paths and settings stay whole."""
    return wrap(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(what: str, state: State, phase: str) -> str:
    return f"llamafactory-preflight: rank {state.rank} ran out of {what} {WORDS[phase]}{_at(phase, state.step)}."


def _at(phase: str, step: int | None) -> str:
    if not step or phase in ("data", "load"):
        return ""
    return f" {'after' if phase in ('evaluate', 'save') else 'of'} step {step}"


def _card(shortage: Shortage, result: Result | None) -> Iterator[str]:
    if shortage.asked is not None:
        yield f"It asked for {size(shortage.asked)}; {size(shortage.free)} were free of {size(shortage.total)}."
    if shortage.allowed is not None:
        yield f"This process was allowed {size(shortage.allowed)}."
    if shortage.idle is not None and shortage.asked is not None and shortage.idle > shortage.asked:
        yield f"The allocator held {size(shortage.idle)} in pieces that were too small."
    ordered = sorted(shortage.others, key=lambda other: -other[1])
    for pid, taken in ordered[:MOST_NEIGHBOURS]:
        yield f"Process {pid}{_name(pid)} has {size(taken)} of the card."
    if ordered[MOST_NEIGHBOURS:]:
        rest = sum(taken for _, taken in ordered[MOST_NEIGHBOURS:])
        yield f"{len(ordered) - MOST_NEIGHBOURS} more have {size(rest)}."
    if not shortage.others:
        for other in result.device.processes if result is not None and result.device is not None else ():
            if other.pid != os.getpid():
                holds = f" with {size(other.used_bytes)}" if other.used_bytes is not None else ""
                yield f"Also on it: process {other.pid}{f' ({other.name})' if other.name else ''}{holds}."


def _against_prediction(shortage: Shortage, state: State, estimate: MemoryEstimate, phase: str) -> Iterator[str]:
    yield f"Predicted for this phase were {size(_predicted(estimate, phase))}."
    if shortage.allocated is not None:
        yield f"It had {size(shortage.allocated)} when it asked for more."
    grown = growth(shortage, state, estimate, phase)
    excess = _excess(shortage, estimate, phase)
    if grown is not None:
        since = f" since step {state.exceeded_at_step}" if state.exceeded_at_step is not None else ""
        amounts = f"{size(grown.measured)} instead of {size(grown.predicted)}"
        yield f"Beyond the prediction are {grown.name}{since}: {amounts}."
    elif excess > _notable(estimate):
        yield f"With what it asked for it would be {size(excess)} beyond the prediction."
    else:
        yield "Nothing has grown beyond the prediction: there was less room than it needs."
    batch, longest = state.current, state.longest
    if batch is not None and phase in ("forward_backward", "evaluate"):
        yield f"The batch was {batch.sequences} x {batch.tokens} tokens"
        if longest is not None and longest != batch and phase == "forward_backward":
            yield f"(the largest before: {longest.sequences} x {longest.tokens}, step {longest.step})"


def _predicted(estimate: MemoryEstimate, phase: str) -> int:
    return estimate.phases.get(phase) or estimate.peak_allocated_bytes


def _notable(estimate: MemoryEstimate) -> int:
    return max(NOTABLE_BYTES, int(NOTABLE_SHARE * estimate.peak_allocated_bytes))


def _excess(shortage: Shortage, estimate: MemoryEstimate, phase: str) -> int:
    """Bytes of what it had and asked for that the prediction for the phase did not have."""
    return max(0, (shortage.allocated or 0) + (shortage.asked or 0) - _predicted(estimate, phase))


def _remedies(case: Case) -> tuple[Remedy, ...]:
    """Changes with which it fits into the budget, even if the phase takes as much more than predicted as it has."""
    result, budget = case.result, case.budget_bytes
    if budget is None or result is None or result.shape is None or result.estimate is None:
        return ()
    device = result.device
    context = device.context_bytes if device is not None else 0
    excess = _excess(case.shortage, result.estimate, case.phase)

    def fits(changed: MemoryEstimate) -> bool:
        if device is None:
            return changed.host_bytes <= budget
        largest = max(changed.phases.values())
        beyond = max(0, _predicted(changed, case.phase) + excess - largest)
        return verdict.need_bounds(changed, context_bytes=context)[1] + beyond <= budget

    return remedies.remedies(
        result.run if device is not None else replace(result.run, use_cpu=True),
        result.shape.model_type,
        software=result.software,
        predict=judgement.predictor(result, length=case.length, eval_length=case.eval_length),
        fits=fits,
        has_bf16=device is None or device.is_ampere,
    )


def _list(items: tuple[str, ...]) -> list[str]:
    return ["  What lowers it:", *(f"    {item}" for item in items)] if items else []


def _name(pid: int) -> str:
    name = name_of(pid)
    return f" ({name})" if name else ""


def _int(beat: Mapping[str, object], name: str) -> int | None:
    value = beat.get(name)
    return value if isinstance(value, int) else None
