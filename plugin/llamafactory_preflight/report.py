"""A result in words and in JSON. Bytes become GiB here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from llamafactory_preflight import __version__, verdict
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.data.lengths import Longest
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.result import Finding, Result
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.units import GIB, gib


WIDTH = 80
SHOWN_BYTES = GIB // 200  # less would be a row that says 0.00 GiB
SCHEMA = 1
TITLES = {"fits": "FITS", "tight": "TIGHT", "will_not_fit": "WILL NOT FIT", "unknown": "UNKNOWN"}
CONTEXTS = {"cuda": "CUDA context", "rocm": "HIP context", "npu": "NPU context", "mps": "Metal context"}
MARKS = {"error": "error", "warning": "warning", "info": "note"}
REFUSAL = "Stopped before loading anything. LLAMAFACTORY_PREFLIGHT=warn starts it all the same."
REFUSAL_AFTER_DATA = "Stopped before loading the weights. LLAMAFACTORY_PREFLIGHT=warn goes on all the same."
NO_REMEDY = "  No change known here makes it fit: it takes a smaller model or a larger card."
LENGTH_DECIDES = "Going on: the data decides. It may fit with samples shorter than cutoff_len."


def text(result: Result) -> str:
    """A short report for a terminal of 80 columns, without colour."""
    lines = [
        f"llamafactory-preflight {__version__}: {result.origin}",
        *_wrapped(_served_line(result.run) if result.serves else _run_line(result.run), indent=""),
    ]
    if result.estimate is not None:
        lines += ["", *_table(result)]
    lines += ["", *_wrapped(f"{TITLES[result.verdict.word]}: {_sentence(result)}", indent="")]
    lines += remedy_lines(result.remedies)
    if result.verdict.word == "will_not_fit" and result.device is not None and not (result.remedies or result.serves):
        lines.append(NO_REMEDY)
    for finding in result.findings:
        lines += _wrapped(finding_line(finding), indent="  ")
    for sentence in result.resolved:
        lines += _wrapped(f"note: {sentence}", indent="  ")
    return "\n".join(lines)


def second_look(result: Result, longest: Longest, *, stops: bool) -> str:
    """What the tokenized data makes of the verdict: one sentence, and the remedies where it does not fit."""
    assert result.device is not None and result.estimate is not None
    needed = verdict.needed_bytes(result.estimate, context_bytes=result.device.context_bytes)
    phases, batch = result.estimate.phases, f"A batch of {result.run.per_device_train_batch_size} as long"
    if phases["evaluate"] == max(phases.values()):
        length = longest.eval_tokens or result.run.cutoff_len
        batch = f"An evaluation of {result.run.per_device_eval_batch_size} with {length} tokens at once"
    sentence = (
        f"llamafactory-preflight: the longest of {longest.num_samples} samples is number {longest.index} with "
        f"{longest.tokens} tokens. {batch} needs {size(needed)}, and "
        f"{size(result.device.free_bytes)} are free: {TITLES[result.verdict.word]}."
    )
    seen = [message(finding) for finding in result.findings if finding.id == "images"]
    lines = [*_wrapped(" ".join([sentence, *seen]), indent=""), *remedy_lines(result.remedies)]
    return "\n".join([*lines, REFUSAL_AFTER_DATA] if stops else lines)


def as_json(result: Result) -> str:
    """One line of JSON, schema 1."""
    estimate, device = result.estimate, result.device
    gpu: dict[str, Any] | None = None
    if estimate is not None and device is not None:
        low, high = estimate.low_bytes, estimate.high_bytes
        gpu = {
            "peak_allocated_bytes": estimate.peak_allocated_bytes,
            "needed_bytes": verdict.needed_bytes(estimate, context_bytes=device.context_bytes),
            "budget_bytes": device.free_bytes,
            "phases": dict(estimate.phases),
            "components": dict(estimate.components),
            "context_bytes": device.context_bytes,
            "nccl_bytes": estimate.nccl_bytes,
            "low_bytes": low,
            "high_bytes": high,
            "devices": [_device(item) for item in result.devices],
        }
    host = {"peak_bytes": estimate.host_bytes if estimate else None, "budget_bytes": result.host_budget_bytes}
    return _object(
        versions=result.software.as_dict(),
        calibrated=gpu is not None and device is not None and device.kind == "cuda",
        file=result.origin,
        model=result.run.model_name_or_path,
        method=method(result.run),
        tokens_per_step=estimate.tokens_per_step if estimate else None,
        gpu=gpu,
        host=host,
        verdict=result.verdict.word,
        reasons=[*result.verdict.reasons, *(estimate.reasons if estimate else ()), *result.resolved],
        remedies=[_remedy(remedy) for remedy in result.remedies],
        findings=[_finding(finding) for finding in result.findings],
    )


def error_as_json(error: UserError, *, origin: str, versions: dict[str, str | None]) -> str:
    """The JSON line that stands for a report which faulty input made impossible."""
    finding = Finding(id="bad-input", severity="error", message=str(error))
    return _object(
        versions=versions, calibrated=False, file=origin, model=None, method=None, tokens_per_step=None, gpu=None,
        host={"peak_bytes": None, "budget_bytes": None}, verdict="unknown", reasons=[str(error)], remedies=[],
        findings=[_finding(finding)],
    )  # fmt: skip


def method(run: RunDescription) -> str:
    """`full`, `freeze`, `lora`, `qlora`, `oft` or `qoft`."""
    return f"q{run.finetuning_type}" if run.quantization_bit is not None else run.finetuning_type


def size(size_bytes: int | None) -> str:
    """An amount of memory for a reader."""
    return "unknown" if size_bytes is None else f"{gib(size_bytes):.2f} GiB"


def message(finding: Finding) -> str:
    """A finding's text with its amounts in GiB."""
    words = finding.message
    for name, amount in finding.amounts.items():
        words = words.replace(f"{{{name}}}", size(amount))
    return words


def finding_line(finding: Finding) -> str:
    """How severe a finding is, and its text."""
    return f"{MARKS[finding.severity]}: {message(finding)}"


def _object(**values: Any) -> str:
    return json.dumps({"schema": SCHEMA, **values})


def _finding(finding: Finding) -> dict[str, Any]:
    chosen = {} if finding.set is None else {"set": dict(finding.set)}
    return {"id": finding.id, "severity": finding.severity, "message": message(finding), **chosen}


def _device(device: Device) -> dict[str, Any]:
    names = ("index", "physical_index", "kind", "name", "uuid", "total_bytes", "free_bytes", "taken_bytes")
    processes = [asdict(process) for process in device.processes]
    return {name: getattr(device, name) for name in names} | {"processes": processes}


def _remedy(remedy: Remedy) -> dict[str, Any]:
    peak = remedy.estimate.peak_allocated_bytes
    return {"set": dict(remedy.set), "peak_allocated_bytes": peak, "costs": remedy.costs}


def fitted(remedy: Remedy, answer: verdict.Verdict) -> str:
    """What was changed of a run that is about to start, and whether it then lacks main memory."""
    largest = size(max(remedy.estimate.phases.values()))
    sentence = f"llamafactory-preflight: changed to fit (LLAMAFACTORY_PREFLIGHT=fit): {largest}, costs {remedy.costs}"
    lacks = () if answer.word == "fits" else answer.reasons
    return "\n".join([*_wrapped(". ".join([sentence, *lacks]), indent=""), f"    {remedy.line}"])


def remedy_lines(remedies: Sequence[Remedy]) -> list[str]:
    """Changes with which a run fits, each as it is added to the command."""
    if not remedies:
        return []
    several = len(remedies) > 1
    lines = [f"  It fits with {'any one of these' if several else 'this'} added to the command:"]
    for remedy in remedies:
        largest = max(remedy.estimate.phases.values())
        lines.append(f"    {remedy.line}")  # one line, to be pasted
        lines += _wrapped(f"takes {size(largest)}; costs {remedy.costs}", indent="      ")
    return lines


def _served_line(run: RunDescription) -> str:
    if run.export_dir is not None:
        return f"{run.model_name_or_path}, export on {run.export_device}"
    return f"{run.model_name_or_path}, chat or API, {run.cutoff_len} tokens and up to {run.max_new_tokens} in answer"


def _run_line(run: RunDescription) -> str:
    name = {"lora": "LoRA", "qlora": "QLoRA", "full": "full tuning", "freeze": "freeze tuning"}.get(method(run))
    rank = f" rank {run.lora_rank}" if run.finetuning_type == "lora" else ""
    precision = "bf16" if run.bf16 or run.pure_bf16 else "fp16" if run.fp16 else "fp32"
    parts = [
        str(run.model_name_or_path),
        f"{run.stage} {name or method(run)}{rank}",
        precision,
        f"batch {run.per_device_train_batch_size} x {run.gradient_accumulation_steps}",
        f"{run.cutoff_len} tokens{' packed' if run.packing else ''}",
    ]
    return ", ".join(parts)


def _table(result: Result) -> list[str]:
    estimate, device = result.estimate, result.device
    assert estimate is not None
    peak, available = estimate.peak_allocated_bytes, result.host_budget_bytes
    rows = [_row(name, amount) for name, amount in estimate.components.items() if amount >= SHOWN_BYTES]
    rows += [_rule(), _row("peak", peak)]
    if device is None:
        rows += [_row("Python, libraries", estimate.host_bytes - peak), _rule()]
        rows += [_row("needed", estimate.host_bytes), _row("main memory free", available)]
    else:
        largest = max(estimate.phases, key=lambda phase: estimate.phases[phase])
        if estimate.phases[largest] > peak:
            rows.append(_row(f"{largest} on top", estimate.phases[largest] - peak))
        rows += [
            _row("allocator slack", estimate.slack_bytes),
            _row(CONTEXTS[device.kind], device.context_bytes),
            *([_row("NCCL", estimate.nccl_bytes)] if estimate.nccl_bytes else []),
            _rule(),
        ]
        needed = verdict.needed_bytes(estimate, context_bytes=device.context_bytes)
        low, high = verdict.need_bounds(estimate, context_bytes=device.context_bytes)
        rows.append(_row("needed", needed) + f"  ({gib(low):.2f} to {gib(high):.2f})")
        free, place = _row("GPU has free", device.free_bytes), _place(result.devices, device)
        rows += [f"{free}  {place}"] if len(free) + len(place) <= WIDTH - 4 else [free, f"  {place}"]
        rows.append(_row("main memory", estimate.host_bytes) + f"  of {size(available)} available")
    return [f"  {row}" for row in rows]


def _place(devices: tuple[Device, ...], decisive: Device) -> str:
    moved = decisive.physical_index not in (None, decisive.index)
    owner = "nvidia-smi" if decisive.kind == "cuda" else "number"
    place = f"GPU {decisive.index}" + (f" = {owner} {decisive.physical_index}" if moved else "")
    name = f"{decisive.name}, planned" if decisive.planned else f"{place}, {decisive.name}"
    return name if len(devices) < 2 else f"{name}, on each of {len(devices)}"


def _row(name: str, amount: int | None) -> str:
    return f"{name.replace('_', ' '):<18}{size(amount):>14}"


def _rule() -> str:
    return "-" * 32


def _sentence(result: Result) -> str:
    reasons = " ".join(result.verdict.reasons)
    estimate, device = result.estimate, result.device
    if estimate is None or result.verdict.word == "unknown":
        return f"{reasons} The run is not judged, and starts as it would without this check."
    if device is None:
        return (
            f"a run on the CPU needs {size(estimate.host_bytes)} and has {size(result.host_budget_bytes)}. {reasons}"
        )
    needed = size(verdict.needed_bytes(estimate, context_bytes=device.context_bytes))
    return f"needs {needed} and has {size(device.free_bytes)}. {reasons}"


def _wrapped(line: str, *, indent: str) -> list[str]:
    return wrap(
        line,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
