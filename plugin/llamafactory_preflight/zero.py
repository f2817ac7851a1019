"""What a DeepSpeed JSON means for memory, with its `auto` values resolved as transformers resolves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from llamafactory_preflight.errors import UserError


Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlan:
    """The settings of `zero_optimization` that decide memory; sizes are element counts.

    Attributes:
        stage: 0 to 3.
        offload_optimizer: Where optimizer states live, if not on the GPU.
        offload_param: Where parameters live between uses; stage 3 only.
        pin_memory: Whether offloaded memory is page-locked, for either of the two.
        overlap_comm: Whether reduction overlaps with the backward pass, which multiplies the buckets.
        reduce_bucket_size: Gradient bucket.
        allgather_bucket_size: Parameter bucket of stages 1 and 2.
        prefetch_bucket_size: Parameters fetched ahead; stage 3.
        persistence_threshold: Tensors below this stay gathered; stage 3.
        max_live_parameters: Limit of gathered parameters; stage 3.
        sub_group_size: Tile of the optimizer step; stage 3.
        gather_on_save: Whether saving collects the 16-bit weights on the first rank.
    """

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    pin_memory: bool
    overlap_comm: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    persistence_threshold: int
    max_live_parameters: int
    sub_group_size: int
    gather_on_save: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, hidden_size: int) -> ZeroPlan:
        """Reads a DeepSpeed configuration.

        `auto` follows transformers/integrations/deepspeed.py: reduce bucket h*h, prefetch 0.9*h*h, persistence 10*h.
        Other defaults are DeepSpeed's (runtime/zero/config.py).

        Raises:
            UserError: One message with every value that is not of its kind.
        """
        section = config.get("zero_optimization", {})
        problems: list[str] = []
        if not isinstance(section, Mapping):
            raise UserError("`zero_optimization` in the DeepSpeed JSON is not an object")

        def count(key: str, default: int, auto: int) -> int:
            value = section.get(key, default)
            if value == "auto":
                return auto
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
                problems.append(f"`{key}` is {value!r}, not a count")
                return default
            return int(value)

        def offload(key: str) -> tuple[Offload, bool]:
            value = section.get(key) or {}
            device = value.get("device", "none") if isinstance(value, Mapping) else value
            if device not in ("none", "cpu", "nvme"):  # a tuple: what stands there may not be hashable
                problems.append(f"`{key}.device` is {device!r}, not none, cpu or nvme")
                device = "none"
            return device, isinstance(value, Mapping) and value.get("pin_memory") is True

        stage = section.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            problems.append(f"`stage` is {stage!r}, not 0, 1, 2 or 3")
            stage = 0
        optimizer, optimizer_pinned = offload("offload_optimizer")
        param, param_pinned = offload("offload_param")
        square = hidden_size * hidden_size
        overlap = section.get("overlap_comm")
        plan = cls(
            stage=stage,
            offload_optimizer=optimizer if stage else "none",
            # DeepSpeed ignores parameter offload below stage 3.
            offload_param=param if stage == 3 else "none",
            pin_memory=optimizer_pinned or param_pinned,
            # Left out, it is true for stage 3 only.
            overlap_comm=overlap if isinstance(overlap, bool) else stage == 3,
            reduce_bucket_size=count("reduce_bucket_size", 500_000_000, square),
            allgather_bucket_size=count("allgather_bucket_size", 500_000_000, 500_000_000),
            prefetch_bucket_size=count("stage3_prefetch_bucket_size", 50_000_000, int(0.9 * square)),
            persistence_threshold=count("stage3_param_persistence_threshold", 100_000, 10 * hidden_size),
            max_live_parameters=count("stage3_max_live_parameters", 1_000_000_000, 1_000_000_000),
            sub_group_size=count("sub_group_size", 1_000_000_000, 1_000_000_000),
            gather_on_save=section.get("stage3_gather_16bit_weights_on_model_save") is True,
        )
        if problems:
            raise UserError(f"In the DeepSpeed JSON {'; '.join(problems)}", where="`zero_optimization`")
        return plan
