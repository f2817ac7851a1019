"""What one process will allocate on its GPU, in closed form, without torch."""

from __future__ import annotations

from llamafactory_preflight.memory.card import Card
from llamafactory_preflight.memory.estimate import estimate
from llamafactory_preflight.memory.inference import inference_estimate
from llamafactory_preflight.memory.result import MemoryEstimate


__all__ = ["Card", "MemoryEstimate", "estimate", "inference_estimate"]
