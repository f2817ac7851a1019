"""What DeepSpeed needs to be told before it offloads to an NVMe; it fails on it once the weights load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamafactory_preflight.memory.parameters import embedding_numel, expert_tensors
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.swapping import BUFFER_SIZE
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


def settings(run: RunDescription, shape: ModelShape | None, *, world: int) -> Iterator[Finding]:
    """A folder for what is offloaded, and buffers that hold a rank's share of the largest parameter.

    Source: deepspeed 0.18.4, runtime/zero/{partition_parameters,stage3}.py (`nvme_path`) and
    runtime/swap_tensor/partitioned_param_swapper.py (`get_buffer`: "More elements ... than buffer size").

    Args:
        run: The run.
        shape: The model, if it is known.
        world: Processes that train together.
    """
    offloaded = {key: value for key in ("offload_optimizer", "offload_param") if (value := _to_nvme(run, key))}
    for key, value in offloaded.items():
        if not value.get("nvme_path"):
            yield Finding(
                id="nvme-path",
                severity="error",
                message=phrase("Offloading to NVMe takes a folder on it: `nvme_path` in `{key}`.", key=key),
            )
    size = offloaded.get("offload_param", {}).get("buffer_size", BUFFER_SIZE)
    share = -(-_largest(shape) // world) if shape is not None else 0
    if "offload_param" in offloaded and isinstance(size, (int, float)) and size < share:
        yield Finding(
            id="nvme-buffer",
            severity="error",
            message=phrase(
                "Offloading weights to NVMe fails with buffers of {size} elements: set `buffer_size` in "
                "`offload_param` to {share} or more, a GPU's share of the largest weight.",
                size=int(size),
                share=share,
            ),
        )


def _largest(shape: ModelShape) -> int:
    return max([embedding_numel(shape), *expert_tensors(shape)])


def _to_nvme(run: RunDescription, key: str) -> Mapping[str, Any] | None:
    """A section of the DeepSpeed JSON that offloads to an NVMe."""
    zero = (run.deepspeed or {}).get("zero_optimization")
    section = zero.get(key) if isinstance(zero, Mapping) else None
    return section if isinstance(section, Mapping) and section.get("device") == "nvme" else None
