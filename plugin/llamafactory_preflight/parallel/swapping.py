"""What a DeepSpeed JSON says of swapping to an NVMe, with DeepSpeed's defaults, and how it rounds what it swaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


ALIGNMENT = 1024
"""Bytes that each of the threads of a request reads and writes a multiple of (runtime/swap_tensor/utils.py)."""
LEAST = 2**20
"""Bytes below which a tensor is not swapped."""
BUFFER_SIZE = 100_000_000
"""Elements of a parameter's buffer where the JSON names none."""
Count = Callable[[Mapping[str, Any], str, int], int]
"""Reads a count from a section, or a default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPlan:
    """Buffers in main memory through which tensors go to an NVMe and back; sizes are element counts.

    Source: deepspeed 0.18.4, runtime/zero/offload_config.py and runtime/swap_tensor/aio_config.py.

    Attributes:
        param_buffers: Buffers for parameters; each parameter that is read or gathered has one.
        param_buffer_size: Elements of such a buffer.
        max_in_cpu: Elements of trained parameters that a rank keeps in main memory all the same.
        optimizer_buffers: Buffers of a tile each, for float32 weights, gradients and states.
        reads_ahead: Whether the next tile is read while one is stepped.
        writes_behind: Whether the tile before is still written then.
        fast_init: Whether float32 weights are made in buffers, without a copy in main memory.
        aligned_bytes: What is swapped is rounded up to a multiple of it.
        least_bytes: Tensors below it are not swapped.
    """

    param_buffers: int
    param_buffer_size: int
    max_in_cpu: int
    optimizer_buffers: int
    reads_ahead: bool
    writes_behind: bool
    fast_init: bool
    aligned_bytes: int
    least_bytes: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], count: Count) -> SwapPlan:
        """Reads `offload_param`, `offload_optimizer` and `aio`."""
        zero = _section(config, "zero_optimization")
        param, optimizer = _section(zero, "offload_param"), _section(zero, "offload_optimizer")
        aio = _section(config, "aio")
        return cls(
            param_buffers=count(param, "buffer_count", 5),
            param_buffer_size=count(param, "buffer_size", BUFFER_SIZE),
            max_in_cpu=count(param, "max_in_cpu", 1_000_000_000),
            optimizer_buffers=count(optimizer, "buffer_count", 4),
            reads_ahead=optimizer.get("pipeline_read") is True,
            writes_behind=optimizer.get("pipeline_write") is True,
            fast_init=optimizer.get("fast_init") is True,
            aligned_bytes=ALIGNMENT * max(1, count(aio, "intra_op_parallelism", 1)),
            least_bytes=max(LEAST, count(aio, "block_size", LEAST)),
        )

    @property
    def pipelines(self) -> bool:
        """Whether tiles are swapped while others are stepped, which is other code."""
        return self.reads_ahead or self.writes_behind

    def swaps(self, size: int) -> bool:
        """Whether a tensor of so many bytes is swapped."""
        return size >= self.least_bytes

    def aligned(self, size: int) -> int:
        """Bytes of a tensor in its file and its buffer."""
        return -(-size // self.aligned_bytes) * self.aligned_bytes


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
