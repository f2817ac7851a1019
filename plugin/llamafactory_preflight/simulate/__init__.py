"""The oracle: the real training step on tensors without storage, for any architecture that transformers knows."""

from __future__ import annotations

from llamafactory_preflight.simulate.estimate import estimate


__all__ = ["estimate"]
