"""Builds the paper model of a run: its layers with the right weights, adapters and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.memory import parameters
from llamafactory_preflight.memory.adapters import Linear, Lora, Quantization
from llamafactory_preflight.memory.decoder import DecoderLayer, Inputs, Kernels
from llamafactory_preflight.memory.ops import FLOAT32, Weight
from llamafactory_preflight.memory.paper import Leaf, Ledger, Storage
from llamafactory_preflight.memory.step import Model
from llamafactory_preflight.model_shape import ModelShape
from llamafactory_preflight.run import RunDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes an element.

    Attributes:
        weights: Of frozen weights in 16 or 32 bit, and of activations without autocast.
        trained: Of what is trained.
        autocast: Of the autocast type, or None.
    """

    weights: int
    trained: int
    autocast: int | None


def precision(run: RunDescription, shape: ModelShape) -> Precision:
    """LLaMA-Factory's choice: compute type by `bf16`/`fp16`/`pure_bf16`, trained parameters in float32 but for `pure_bf16`.

    Source: llamafactory/hparams/parser.py (compute_dtype), llamafactory/model/adapter.py (cast_trainable_params_to_fp32).
    PEFT makes adapters of a 16-bit model float32 in either case (autocast_adapter_dtype).
    """
    mixed = run.bf16 or run.fp16
    low = mixed or run.pure_bf16 or shape.dtype in ("bfloat16", "float16")
    keeps = (run.pure_bf16 or run.use_badam) and run.finetuning_type in ("full", "freeze")
    weights = 2 if low else FLOAT32
    return Precision(weights=weights, trained=weights if keeps else FLOAT32, autocast=2 if mixed else None)


class Builder:
    """Makes layers whose weights know whether they are trained.

    Args:
        fresh_gradients: Gradients are made anew in each micro-step (no accumulation), so the ledger sees them grow.
    """

    def __init__(
        self, run: RunDescription, shape: ModelShape, ledger: Ledger, kernels: Kernels, *, fresh_gradients: bool
    ) -> None:
        self.run, self.shape, self.ledger, self.kernels = run, shape, ledger, kernels
        self.fresh_gradients = fresh_gradients
        self.precision = precision(run, shape)
        self.booked = Storage(ledger, 0, "weights")
        self.targets = (
            parameters.lora_targets(run, shape) if run.finetuning_type in ("lora", "oft") else {}
        )

    def leaf(self) -> Leaf:
        """A parameter's end of the graph; with accumulation its gradient is booked elsewhere for good."""
        return Leaf() if self.fresh_gradients else Leaf(self.booked)

    def weight(self, numel: int, *, trained: bool, width: int = 1) -> Weight:
        """A parameter; its own bytes are booked with the model's."""
        itemsize = self.precision.trained if trained else self.precision.weights
        return Weight(numel, itemsize, self.booked, width=width, leaf=self.leaf() if trained else None)

    def layer(self, inputs: Inputs, *, trained: bool) -> DecoderLayer:
        """A decoder layer; `trained` is whether its own parameters are (full and freeze tuning)."""
        linears = {
            name: self._linear(name, linear, trained=trained)
            for name, linear in parameters.layer_linears(self.shape).items()
        }
        norms = {name: self.weight(n, trained=trained) for name, n in parameters.layer_norms(self.shape).items()}
        return DecoderLayer(linears=linears, norms=norms, kernels=self.kernels, inputs=inputs)

    def _linear(self, name: str, linear: parameters.LinearShape, *, trained: bool) -> Linear:
        weight = self.weight(linear.numel, trained=trained, width=linear.in_features)
        bits = self.run.quantization_bit
        quantization = Quantization(bits=bits, compute_itemsize=2) if bits in (4, 8) else None
        return Linear(weight=weight, quantization=quantization, lora=self._lora(name, linear), has_bias=linear.bias)

    def _lora(self, name: str, linear: parameters.LinearShape) -> Lora | None:
        if name not in self.targets:
            return None
        rank = self.run.lora_rank
        a = Weight(rank * linear.in_features, FLOAT32, self.booked, width=linear.in_features, leaf=self.leaf())
        b = Weight(rank * linear.out_features, FLOAT32, self.booked, width=rank, leaf=self.leaf())
        magnitude = Weight(linear.out_features, FLOAT32, self.booked, leaf=self.leaf()) if self.run.use_dora else None
        return Lora(a=a, b=b, dropout=self.run.lora_dropout, magnitude=magnitude)


def checkpointing_kind(run: RunDescription) -> str:
    """Which checkpointing really runs.

    `gradient_checkpointing: true` makes the Trainer enable it once more, whatever LLaMA-Factory's own switches say.
    """
    if run.disable_gradient_checkpointing and not run.gradient_checkpointing:
        return "off"
    if run.use_unsloth_gc and not run.disable_gradient_checkpointing:
        return "host"
    return "reentrant" if run.use_reentrant_gc or run.gradient_checkpointing else "non_reentrant"


__all__ = ["Builder", "Mapping", "Model", "Precision", "checkpointing_kind", "precision"]
