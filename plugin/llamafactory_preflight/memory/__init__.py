"""What one training process will allocate on its GPU, in closed form, without torch."""

from __future__ import annotations

from llamafactory_preflight.memory.estimate import Card, MemoryEstimate, estimate


__all__ = ["Card", "MemoryEstimate", "estimate"]
