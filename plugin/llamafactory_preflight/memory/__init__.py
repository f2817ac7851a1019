"""What each process will allocate on its GPU, in closed form, without torch."""

from __future__ import annotations

from llamafactory_preflight.memory.card import Card
from llamafactory_preflight.memory.estimate import estimate
from llamafactory_preflight.memory.estimators.inference import inference_estimate
from llamafactory_preflight.memory.remarks import keeps_tower
from llamafactory_preflight.memory.result import MemoryEstimate
from llamafactory_preflight.memory.sharding import Ranks


__all__ = ["Card", "MemoryEstimate", "Ranks", "estimate", "inference_estimate", "keeps_tower"]
