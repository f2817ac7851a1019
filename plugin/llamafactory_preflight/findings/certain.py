"""Findings with which no training gets as far as its first step, on any machine."""

from __future__ import annotations

from collections.abc import Sequence

from llamafactory_preflight.result import Finding


CERTAIN = frozenset(
    {
        "template-unknown", "data-set-unknown", "data-list-missing", "data-file-missing", "data-folder-empty",
        "data-rows", "adapter-missing", "checkpoint-missing", "output-dir", "no-samples", "quantization-bits",
        "dropout-range", "lora-target-unknown", "logger-unknown", "low-rank-optimizer",
    }
)  # fmt: skip


def stops(found: Sequence[Finding]) -> bool:
    """Whether LLaMA-Factory would end with one of them, after what it loads before that."""
    return any(finding.severity == "error" and finding.id in CERTAIN for finding in found)
