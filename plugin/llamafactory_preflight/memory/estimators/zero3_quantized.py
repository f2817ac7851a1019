"""4-bit weights under ZeRO-3: loaded whole on every card, then shared out as what their bytes are packed in.

Source: transformers' modeling_utils.py (get_init_context leaves out zero.Init for a quantized model),
quantizers/quantizer_bnb_4bit.py (all on the rank's own card), llamafactory/model/model_utils/quantization.py
(`bnb_4bit_quant_storage` is the type that the run computes in), deepspeed 0.18.4, runtime/engine.py and
runtime/zero/partition_parameters.py. The statistics of a weight are no parameters: every card keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from llamafactory_preflight.memory import parameters, sharding, statics
from llamafactory_preflight.memory.estimators.sharded import ShardedEstimator
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.quantization import Quantized, quantization, weight_bytes
from llamafactory_preflight.memory.sharding import Parameter
from llamafactory_preflight.memory.zero.stage3 import partition
from llamafactory_preflight.model.shape import ModelShape


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


class QuantizedShards(ShardedEstimator):
    """An estimate under way, for a run under ZeRO-3 whose weights are 4 bit."""

    initializes = False

    @cached_property
    def kind(self) -> Quantized:
        """How the weights are quantized."""
        found = quantization(self.run, self.shape)
        assert found is not None
        return found

    @cached_property
    def everything(self) -> Sequence[Parameter]:
        """All parameters as DeepSpeed sees them, in order."""
        return packed(sharding.in_order(self.run, self.shape), self.shape, self.kind, item=self.item)

    @cached_property
    def statistics(self) -> int:
        """Bytes of scales and tables."""
        return statistics_bytes(self.shape, self.kind, self.block)

    def remarks(self) -> Iterator[str]:
        """What else is to be said."""
        yield from super().remarks()
        yield "Each card loads the whole 4-bit model before ZeRO-3 shares it, and keeps all of its scales."

    def _partitioned(self) -> dict[str, int]:
        held = super()._partitioned()
        return held | {"weights": held["weights"] + self.statistics}

    def _load(self) -> int:
        """As loaded with float32 adapters, or as the cuts begin, or what follows them."""
        loaded = dtypes.named(self.shape.dtype)
        whole = statics.base_weight_bytes(self.run, self.shape, loaded=loaded, trained=loaded, block=self.block)
        adapters = statics.tensor_bytes(self.groups, dtypes.size(FLOAT32), self.block)
        return max(whole + adapters, self._cuts(), super()._load())

    def _cuts(self) -> int:
        """Peak while a shard is made of each parameter, which goes then, one after the other."""
        live = self.statistics + sum(self.block(parameter.numel * self.item) for parameter in self.everything)
        peak, offloads = live, self.plan.offload_param != "none"
        for parameter in self.everything:
            shard = 0 if offloads else self.block(partition(parameter, self.ranks.world) * self.item)
            peak = max(peak, live + shard)
            live += shard - self.block(parameter.numel * self.item)
        return peak
