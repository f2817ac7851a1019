"""4-bit weights under ZeRO-3: loaded whole on every card, then shared out as what their bytes are packed in.

Source: transformers' modeling_utils.py (get_init_context leaves out zero.Init for a quantized model),
quantizers/quantizer_bnb_4bit.py (all on the rank's own card), llamafactory/model/model_utils/quantization.py
(`bnb_4bit_quant_storage` is the type that the run computes in), deepspeed 0.18.4, runtime/engine.py and
runtime/zero/partition_parameters.py. The statistics of a weight are no parameters: every card keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llamafactory_preflight.memory import dtypes, parameters, statics
from llamafactory_preflight.memory.dtypes import FLOAT32
from llamafactory_preflight.memory.quantization import Quantized, weight_bytes
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero3 import partition
from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.run import RunDescription


def packed(everything: Sequence[Parameter], shape: ModelShape, kind: Quantized, *, item: int) -> tuple[Parameter, ...]:
    """The same parameters, quantized ones with the elements of `item` bytes that DeepSpeed sees in them."""
    linears = parameters.layer_linears(shape)
    return tuple(
        replace(parameter, numel=-(-parameter.numel * kind.bits // (8 * item)))
        if parameter.key[1] in linears
        else parameter
        for parameter in everything
    )


def statistics_bytes(shape: ModelShape, kind: Quantized, block: Callable[[int], int]) -> int:
    """Scales and tables of all quantized weights."""
    linears = parameters.layer_linears(shape).values()
    return shape.num_layers * sum(
        weight_bytes(kind, linear.numel, linear.out_features, block) - block(linear.numel * kind.bits // 8)
        for linear in linears
    )


def load_bytes(
    run: RunDescription,
    shape: ModelShape,
    everything: Sequence[Parameter],
    *,
    statistics: int,
    world: int,
    item: int,
    offloads: bool,
    block: Callable[[int], int],
) -> int:
    """Peak until DeepSpeed has cut all parameters: as loaded with float32 adapters, or as the cuts begin.

    Args:
        run: The run.
        shape: The model.
        everything: All parameters as DeepSpeed sees them.
        statistics: Bytes of scales and tables.
        world: Ranks.
        item: Bytes of an element once DeepSpeed has cast the model.
        offloads: Whether shards go to main memory.
        block: Bytes that the allocator counts for a request.
    """
    loaded = statics.base_weight_bytes(
        run, shape, loaded=dtypes.named(shape.dtype), trained=dtypes.named(shape.dtype), block=block
    )
    adapters = statics.tensor_bytes(statics.trainable_groups(run, shape), dtypes.size(FLOAT32), block)
    live = statistics + sum(block(parameter.numel * item) for parameter in everything)
    peak = live
    for parameter in everything:
        shard = 0 if offloads else block(partition(parameter, world) * item)
        peak = max(peak, live + shard)
        live += shard - block(parameter.numel * item)
    return max(loaded + adapters, peak)
