"""Changes the least costly settings of a run until it fits, within what the user lets be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamafactory_preflight.advice import remedies
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.fitting import judgement
from llamafactory_preflight.result import Result


KEPT = {
    "quantization": frozenset({"quantization_bit"}),
    "cutoff": frozenset({"cutoff_len"}),
    "precision": frozenset({"bf16", "pure_bf16"}),
    "method": frozenset({"finetuning_type"}),
    "optimizer": frozenset({"optim"}),
}
"""What stays unless it is allowed by this name. The effective batch always stays."""


def fitting(result: Result, *, allow: frozenset[str], length: int | None = None) -> Remedy | None:
    """The least costly changes with which a run fits with margin, or None where nothing allowed makes it fit.

    Args:
        result: The run as it is; its verdict is `tight` or `will_not_fit`.
        allow: Names of what else may be changed.
        length: Tokens of the longest sample, where it is known.
    """
    kept = frozenset().union(*(names for name, names in KEPT.items() if name not in allow))
    found = judgement.proposed(result, length=length, kept=kept)
    return found[0] if found else None


def as_arguments(changed: Mapping[str, Any], *, flags: bool) -> list[str]:
    """Changes as they are added to LLaMA-Factory's command line: `key=value`, or `--key value` among flags."""
    if not flags:
        return remedies.items(changed)
    return [word for key, value in changed.items() for word in (f"--{key}", remedies.as_text(value))]
