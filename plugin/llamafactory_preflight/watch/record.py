"""`preflight.json` in `output_dir`: what was predicted, what was measured, with which versions and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llamafactory_preflight import report
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.result import Result


FILE = "preflight.json"
SCHEMA = 1
SECRET_NAMES = re.compile(r"(_token|api_key|_secret|password|webhook_url|credentials?)$|^ray_init_kwargs$")
SECRET_VALUES = re.compile(r"\bhf_[A-Za-z0-9]{16,}|://[^/@\s]+:[^/@\s]+@")


def content(
    result: Result | None, given: Mapping[str, Any], ranks: Iterable[Mapping[str, Any]], versions: Mapping[str, Any]
) -> dict[str, Any]:
    """One run as JSON.

    Args:
        result: The prediction, or None where there was none.
        given: LLaMA-Factory's arguments by name.
        ranks: What each process has measured, as `State.as_dict` has it.
        versions: Installed versions by name.
    """
    measured = sorted(ranks, key=lambda rank: int(rank["rank"]))
    return {
        "schema": SCHEMA,
        "versions": dict(versions),
        "arguments": without_secrets(given),
        "prediction": None if result is None or result.estimate is None else _prediction(result, result.estimate),
        "measurement": _merged(measured),
        "ranks": measured,
    }


def without_secrets(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without tokens, keys and passwords, whether named so or recognized by their form."""
    return {
        name: value
        for name, value in given.items()
        if not SECRET_NAMES.search(name) and not SECRET_VALUES.search(repr(value))
    }


def line(result: Result | None, ranks: Iterable[Mapping[str, Any]]) -> str | None:
    """Predicted, measured and the difference in one sentence; None where nothing was measured."""
    merged = _merged(list(ranks))
    on_gpu = merged["on_gpu"]
    measured = merged["peak_allocated_bytes"] if on_gpu else merged["host_peak_bytes"]
    if not measured:
        return None
    what = f"peak {'GPU' if on_gpu else 'main'} memory"
    estimate = result.estimate if result is not None else None
    if estimate is None:
        return f"{what}: measured {report.size(measured)}"
    predicted = estimate.peak_allocated_bytes if on_gpu else estimate.host_bytes
    difference = measured - predicted
    return (
        f"{what}: predicted {report.size(predicted)}, measured {report.size(measured)}, difference "
        f"{'-' if difference < 0 else '+'}{report.size(abs(difference))} ({difference / predicted:+.1%})"
    )


def _prediction(result: Result, estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "verdict": result.verdict.word,
        "peak_allocated_bytes": estimate.peak_allocated_bytes if result.device is not None else None,
        "low_bytes": estimate.low_bytes,
        "high_bytes": estimate.high_bytes,
        "phases": dict(estimate.phases),
        "components": dict(estimate.components),
        "host_bytes": estimate.host_bytes,
        "tokens_per_step": estimate.tokens_per_step,
        "budget_bytes": result.device.free_bytes if result.device is not None else result.host_budget_bytes,
    }


def _merged(ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The highest of all processes, as the fullest decides; they share a machine's main memory, so its sum too."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes", "steps")
    seen = {name: [rank[name] for rank in ranks if rank[name] is not None] for name in names}
    merged: dict[str, Any] = {name: max(values, default=None) for name, values in seen.items()}
    free = [rank["least_free_bytes"] for rank in ranks if rank["least_free_bytes"] is not None]
    return merged | {
        "on_gpu": any(rank["on_gpu"] for rank in ranks),
        "num_ranks": len(ranks),
        "least_free_bytes": min(free, default=None),
        "host_peak_bytes_of_all": sum(rank["host_peak_bytes"] or 0 for rank in ranks),
    }
