"""What a DeepSpeed JSON means for memory, with its `auto` values resolved as transformers resolves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.parallel.swapping import SwapPlan
from llamafactory_preflight.phrases import joined, phrase


Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "auto", "fp32"]

OTHER_CODE = (
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "mics_shard_size", "zenflow", "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "leaf_module", "elastic_checkpoint",
)  # fmt: skip
"""Keys of `zero_optimization` that change what is allocated."""
OTHER_SECTIONS = ("tensor_parallel", "torch_autocast", "amp", "compression_training", "optimizer", "sparse_attention")
"""Sections that do; with an `optimizer` DeepSpeed makes its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlan:
    """The settings of `zero_optimization` that decide memory; sizes are element counts.

    Attributes:
        stage: 0 to 3.
        offload_optimizer: Where optimizer states live, if not on the GPU.
        offload_param: Where parameters live between uses; stage 3 only.
        pin_optimizer: Whether what is offloaded for the optimizer is page-locked.
        pin_param: The same for offloaded parameters.
        overlap_comm: Whether reduction overlaps with the backward pass, which takes a second bucket below stage 3.
        reduce_scatter: Whether a bucket is copied together before it is reduced.
        contiguous_gradients: Whether gradients are copied into the bucket as they come.
        round_robin_gradients: Whether parameters are dealt out to the ranks in turn; stages 1 and 2.
        reduce_bucket_size: Gradient bucket.
        allgather_bucket_size: Parameter bucket of stages 1 and 2.
        prefetch_bucket_size: Parameters fetched ahead; stage 3.
        persistence_threshold: Tensors below this stay gathered; stage 3.
        max_live_parameters: Limit of gathered parameters; stage 3.
        max_reuse_distance: Parameters used again within as many elements stay gathered; stage 3.
        sub_group_size: Tile of the optimizer step; stage 3.
        gather_on_save: Whether saving collects the 16-bit weights on the first rank.
        swap: How it is swapped to an NVMe what is offloaded there.
        precision: What the model computes in: `bf16`, `fp16`, `auto` (as the Trainer's arguments say) or `fp32`.
        unmodelled: Settings that put a run on code that no formula follows.
    """

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    pin_optimizer: bool
    pin_param: bool
    overlap_comm: bool
    reduce_scatter: bool
    contiguous_gradients: bool
    round_robin_gradients: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    sub_group_size: int
    gather_on_save: bool
    swap: SwapPlan
    precision: Precision
    unmodelled: tuple[str, ...]

    @property
    def pin_memory(self) -> bool:
        """Whether anything that is offloaded is page-locked."""
        return self.pin_optimizer or self.pin_param

    @property
    def swaps(self) -> bool:
        """Whether anything is offloaded to an NVMe."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

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
            return auto if section.get(key, default) == "auto" else counted(section, key, default)

        def counted(within: Mapping[str, Any], key: str, default: int) -> int:
            value = within.get(key, default)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
                problems.append(phrase("`{key}` is {value}, not a count", key=key, value=repr(value)))
                return default
            return int(value)

        def offload(key: str) -> tuple[Offload, bool]:
            value = section.get(key) or {}
            device = value.get("device", "none") if isinstance(value, Mapping) else value
            if device not in ("none", "cpu", "nvme"):  # a tuple: what stands there may not be hashable
                problems.append(
                    phrase("`{key}.device` is {value}, not none, cpu or nvme", key=key, value=repr(device))
                )
                device = "none"
            return device, isinstance(value, Mapping) and value.get("pin_memory") is True

        stage = section.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            problems.append(phrase("`stage` is {value}, not 0, 1, 2 or 3", value=repr(stage)))
            stage = 0
        optimizer, optimizer_pinned = offload("offload_optimizer")
        param, param_pinned = offload("offload_param")
        square = hidden_size * hidden_size
        overlap = section.get("overlap_comm")
        plan = cls(
            stage=stage,
            offload_optimizer=_offloaded(optimizer, stage),
            # DeepSpeed ignores parameter offload below stage 3.
            offload_param=param if stage == 3 else "none",
            pin_optimizer=optimizer_pinned,
            pin_param=param_pinned,
            # Left out, it is true for stage 3 only.
            overlap_comm=overlap if isinstance(overlap, bool) else stage == 3,
            reduce_scatter=section.get("reduce_scatter", True) is True,
            # DeepSpeed insists on it when it offloads.
            contiguous_gradients=section.get("contiguous_gradients", True) is True
            or (optimizer != "none" and stage < 3),
            round_robin_gradients=section.get("round_robin_gradients") is True,
            reduce_bucket_size=count("reduce_bucket_size", 500_000_000, square),
            allgather_bucket_size=count("allgather_bucket_size", 500_000_000, 500_000_000),
            prefetch_bucket_size=count("stage3_prefetch_bucket_size", 50_000_000, int(0.9 * square)),
            persistence_threshold=count("stage3_param_persistence_threshold", 100_000, 10 * hidden_size),
            max_live_parameters=count("stage3_max_live_parameters", 1_000_000_000, 1_000_000_000),
            max_reuse_distance=count("stage3_max_reuse_distance", 1_000_000_000, 1_000_000_000),
            sub_group_size=count("sub_group_size", 1_000_000_000, 1_000_000_000),
            gather_on_save=section.get("stage3_gather_16bit_weights_on_model_save") is True,
            swap=SwapPlan.from_config(config, counted),
            precision=_precision(config),
            unmodelled=tuple(_unmodelled(config, section)),
        )
        if problems:
            what = phrase("In the DeepSpeed JSON {problems}", problems=joined("; ", problems))
            raise UserError(what, where="`zero_optimization`")
        return plan


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as DeepSpeed itself reads it: what is `auto` there is left out (runtime/config_utils.py)."""
    section = _section(config, "zero_optimization")
    return {**config, "zero_optimization": {key: value for key, value in section.items() if value != "auto"}}


def _precision(config: Mapping[str, Any]) -> Precision:
    """DeepSpeed casts the whole model to it, adapters and norms included (runtime/engine.py)."""
    enabled = {name: _section(config, name).get("enabled", False) for name in ("bf16", "fp16")}
    if enabled["bf16"] is True or enabled["fp16"] is True:
        return "bf16" if enabled["bf16"] is True else "fp16"
    return "auto" if "auto" in enabled.values() else "fp32"


def _offloaded(device: Offload, stage: int) -> Offload:
    """Stages 1 and 2 know no NVMe, and offload to main memory where one is asked for (stage_1_and_2.py)."""
    if stage == 0:
        return "none"
    return "cpu" if device == "nvme" and stage < 3 else device


def _unmodelled(config: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in OTHER_CODE if section.get(key) not in (None, False, 0, 1))
    yield from (key for key in OTHER_SECTIONS if config.get(key))
    if _section(config, "data_types").get("grad_accum_dtype") is not None:
        yield "grad_accum_dtype"
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow"):
        if _section(config, "bf16").get(key):
            yield key
    if _section(config, "fp16").get("fp16_master_weights_and_grads"):
        yield "fp16_master_weights_and_grads"
    offload = section.get("offload_optimizer")
    if isinstance(offload, Mapping) and offload.get("ratio", 1) not in (1, 1.0):
        yield "offload_optimizer.ratio"
    if isinstance(offload, Mapping) and offload.get("super_offload"):
        yield "offload_optimizer.super_offload"
    if _section(config, "aio").get("use_gds"):
        yield "aio.use_gds"
    if config.get("communication_data_type") is not None:
        yield "communication_data_type"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
