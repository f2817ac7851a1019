"""Builds the paper model of a run: its layers with the right weights, adapters and kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llamafactory_preflight.memory import parameters, statics
from llamafactory_preflight.memory.batch import Batch, attention_kernel
from llamafactory_preflight.memory.layers import build_experts
from llamafactory_preflight.memory.layers.adapters import Linear, Lora, Oft, Quantization
from llamafactory_preflight.memory.layers.attention import AttentionCall
from llamafactory_preflight.memory.layers.checkpointing import checkpointing_kind, hooks_inputs
from llamafactory_preflight.memory.layers.decoder import DecoderLayer, Inputs, Kernels
from llamafactory_preflight.memory.layers.step import Model, Segment
from llamafactory_preflight.memory.layers.tower import Tower, frozen_tower
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BOOL, FLOAT32, INT64
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Leaf, Storage
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.memory.sharding import ENDS, VALUE_HEAD, Gradients
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


ADAPTERS = ("lora", "oft")


class Builder:
    """Makes the model of a run, whose weights know whether they are trained.

    Args:
        run: The run.
        shape: The model.
        ops: The operations, with the ledger.
        fresh_gradients: Gradients are made anew in each micro-step (no accumulation), so the ledger sees them grow.
        first_step: No optimizer states exist, and kernels are tuned.
        block: The only layer that trains in this step, or None where the run's method decides (BAdam).
        gradients: What takes the gradients in hand as they come, where ranks share them: every layer is then run.
        bypassed: Whether adapters are there and do nothing.
    """

    def __init__(
        self,
        run: RunDescription,
        shape: ModelShape,
        ops: Ops,
        *,
        fresh_gradients: bool,
        first_step: bool = False,
        block: int | None = None,
        gradients: Gradients | None = None,
        bypassed: bool = False,
    ) -> None:
        self.run, self.shape, self.ops = run, shape, ops
        self.fresh_gradients, self.first_step = fresh_gradients, first_step
        self.block, self.gradients, self.number, self.bypassed = block, gradients, ENDS, bypassed
        self.precision = precision(run, shape)
        self.kernels = Kernels(
            liger=run.enable_liger_kernel and shape.family.liger,
            attention=attention_kernel(run),
            wide_norm=shape.family.wide_norm,
        )
        self.every_norm = parameters.trains_every_norm(run)
        self.booked = Storage(ops.ledger, 0, "weights")
        self.targets = parameters.lora_targets(run, shape) if run.finetuning_type in ADAPTERS else {}

    def model(self, batch: Batch) -> Model:
        """The trained model, for one batch."""
        full = self.run.finetuning_type == "full" and self.block is None
        extra = self.run.freeze_extra_modules if self.run.finetuning_type == "freeze" else self.run.additional_target
        ends = tuple(full or name in extra for name in ("embed_tokens", "norm", "lm_head"))
        inputs = self._inputs(batch, hidden=self.precision.trained if ends[0] else self.precision.loaded)
        liger_loss = self.kernels.liger and self.run.stage in ("pt", "sft") and not self.run.label_smoothing_factor
        kind = checkpointing_kind(self.run)
        return self._model(self._segments(inputs, batch), batch, ends, kind=kind, liger_loss=liger_loss)

    def base_model(self, batch: Batch) -> Model:
        """A model without adapters, or with such as do nothing, that is not trained."""
        if not self.bypassed:
            self.targets = {}
        self.every_norm = False
        inputs, count = self._inputs(batch, hidden=self.precision.loaded), self.shape.num_layers
        parts = [count] if self.ops.modules is None else [1] * count
        segments = []
        for self.number, number in enumerate(parts):
            segments.append(self._segment(inputs, number, trained=False))
        self.number = ENDS
        return self._model(segments, batch, (False,) * 3, kind="off", liger_loss=False)

    def value_head(self) -> Weight:
        """The reward model's head: one row, in float32 unless DeepSpeed casts it."""
        dtype = FLOAT32 if self.run.deepspeed is None else self.precision.trained
        hidden, name = self.shape.hidden_size, VALUE_HEAD
        return Weight(hidden, dtype, self.booked, width=hidden, leaf=self.leaf(name), key=(ENDS, name))

    def _segments(self, inputs: Inputs, batch: Batch) -> list[Segment]:
        """The trained model's layers in groups of a kind.

        The first layer stands alone where it differs from those behind it: its input needs no gradient without
        checkpointing, stays alive as a leaf when the others' inputs go to the host, and is in the checkpoint's type
        where the others' are float32, because autocast has another. So does the last: its backward runs while all
        others still hold what they keep.
        """
        count, run = self.shape.num_layers, self.run
        if self.block is not None:
            behind = count - self.block - 1
            parts = [(False, self.block), (True, 1), (False, behind - 1), (False, min(1, behind))]
        elif run.finetuning_type == "freeze":
            trained = min(abs(run.freeze_trainable_layers), count)
            parts = [(False, count - trained), (True, trained - 1), (True, 1)]
            if run.freeze_trainable_layers < 0:
                parts = [(True, 1), (True, trained - 1), (False, count - trained - 1), (False, 1)]
        else:
            full = run.finetuning_type == "full"
            mixed = self.precision.autocast not in (None, self.precision.loaded)
            alone = checkpointing_kind(run) in ("off", "host") or mixed
            parts = [(full, 1), (full, count - 2), (full, 1)] if alone else [(full, count - 1), (full, 1)]
        unwindowed = replace(inputs, mask=None if batch.mask == "none" else inputs.mask)
        alike = [part for part in self._with_full_attention(parts) if part[1] > 0]
        if self.gradients is not None:
            alike = [(trained, 1, windowed) for trained, number, windowed in alike for _ in range(number)]
        segments = []
        for number, (trained, numbers, windowed) in enumerate(alike):
            self.number = number
            segments.append(self._segment(inputs if windowed else unwindowed, numbers, trained))
        self.number = ENDS
        return segments

    def _with_full_attention(self, parts: list[tuple[bool, int]]) -> list[tuple[bool, int, bool]]:
        """Splits the layers without a window off the largest part: which layers they are hardly moves a peak."""
        full = self.shape.num_full_attention_layers if self.shape.sliding_window is not None else 0
        largest = max(range(len(parts)), key=lambda index: parts[index][1])
        split: list[tuple[bool, int, bool]] = []
        for index, (trained, number) in enumerate(parts):
            here = min(full, number - 1) if index == largest else 0
            split += [(trained, here, False), (trained, number - here, True)]
        return split

    def _segment(self, inputs: Inputs, count: int, trained: bool) -> Segment:
        groups = statics.layer_groups(self.run, self.shape, count=1) if trained else []
        if self.targets:
            groups = statics.layer_adapter_groups(self.run, self.shape)
        elif self.every_norm and not trained:
            groups = statics.norm_groups(self.shape, count=1)
        itemsize = dtypes.size(self.precision.trained)
        gradients = statics.tensor_bytes(groups, itemsize, self.ops.ledger.block) if self.fresh_gradients else 0
        return Segment(
            layer=self.layer(inputs, trained=trained),
            count=count,
            trained=trained or bool(self.targets) or self.every_norm,
            gradient_bytes=gradients,
        )

    def _model(
        self, segments: list[Segment], batch: Batch, ends: tuple[bool, ...], *, kind: str, liger_loss: bool
    ) -> Model:
        size = parameters.embedding_numel(self.shape)
        embedding = self.weight("embed_tokens", size, trained=ends[0], width=self.shape.hidden_size)
        tied = self.shape.tie_word_embeddings and not self.run.additional_target
        hooked = bool(self.targets) and hooks_inputs(self.run, self.shape)
        return Model(
            embedding=embedding,
            final_norm=self._norm("norm", self.shape.hidden_size, trained=ends[1]),
            head=embedding if tied else self.weight("lm_head", size, trained=ends[2], width=self.shape.hidden_size),
            segments=segments,
            checkpointing=kind,
            input_requires_grad=hooked,
            liger_loss=liger_loss,
            masked_loss=self.shape.family.masked_loss,
            converts_outputs=self.precision.autocast is not None,
            noise=bool(self.run.neftune_noise_alpha),
            wrapped=bool(self.targets),
            upcasts_logits=self.run.upcast_lmhead_output and not ends[2],
            smooths=self.run.label_smoothing_factor > 0,
            alone=batch.sequences == 1,
            tower=self._tower(batch, hooked=hooked),
        )

    def _tower(self, batch: Batch, *, hooked: bool) -> Tower | None:
        shape = self.shape.vision.tower if self.shape.vision is not None else None
        if shape is None or not batch.images:
            return None
        dtype, kind, lowers = self.precision.loaded, self._quantization(), self.run.deepspeed is None
        return frozen_tower(self.ops, shape, batch, self.kernels, dtype=dtype, kind=kind, hooked=hooked, lowers=lowers)

    def _mask_kind(self, batch: Batch) -> str:
        """A sequence longer than the window gets a mask in the layers that have one."""
        window = self.shape.sliding_window
        sliding = window is not None and batch.length > window and self.kernels.attention == "sdpa"
        return "boolean" if sliding and batch.mask == "none" else batch.mask

    def _inputs(self, batch: Batch, *, hidden: int) -> Inputs:
        """Rotary tables, mask and ids of one micro-batch."""
        shape, ops = self.shape, self.ops
        angles = batch.rotary_numel(shape.head_dim)
        numel = batch.sequences * batch.length**2
        waiting = numel * (batch.prefetched - 1) if batch.mask == "additive" and self.run.neat_packing else 0
        mask = {
            "none": None,
            "boolean": (numel, BOOL),
            "additive": (numel, self.precision.compute if self.run.neat_packing else hidden),
        }[self._mask_kind(batch)]
        return Inputs(
            call=AttentionCall(
                batch=batch.sequences,
                length=batch.length,
                num_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_key_value_heads,
                head_dim=shape.head_dim,
            ),
            cos=ops.empty(angles, hidden),
            sin=ops.empty(angles, hidden),
            mask=ops.empty(*mask) if mask is not None else None,
            waiting_masks=ops.empty(waiting, self.precision.compute),
            ids=ops.empty(batch.id_rows * batch.tokens * batch.prefetched, INT64),
        )

    def leaf(self, name: str = "") -> Leaf:
        """A parameter's end of the graph; with accumulation its gradient is booked elsewhere for good."""
        if self.gradients is not None:
            key = self.number, name
            return Leaf(self.gradients.gradient(key), receive=partial(self.gradients.receive, key))
        return Leaf() if self.fresh_gradients else Leaf(self.booked)

    def weight(self, name: str, numel: int, *, trained: bool, width: int = 1) -> Weight:
        """A parameter; its own bytes are booked with the model's."""
        dtype = self.precision.trained if trained else self.precision.loaded
        leaf = self.leaf(name) if trained else None
        return Weight(numel, dtype, self.booked, width=width, leaf=leaf, key=(self.number, name))

    def _adapter(self, name: str, numel: int, *, width: int = 1) -> Weight:
        """A parameter that PEFT adds."""
        return self.weight(name, numel, trained=True, width=width)

    def layer(self, inputs: Inputs, *, trained: bool) -> DecoderLayer:
        """A decoder layer; `trained` is whether its own parameters are (full and freeze tuning)."""
        linears = {
            name: self.linear(name, linear, trained=trained and parameters.trains(self.run, self.shape, name))
            for name, linear in parameters.layer_linears(self.shape).items()
        }
        norms = {
            name: self._norm(
                name, n, trained=(trained and parameters.trains(self.run, self.shape, name)) or self.every_norm
            )
            for name, n in parameters.layer_norms(self.shape).items()
        }
        trains_experts = trained and parameters.trains(self.run, self.shape, "experts")
        experts = build_experts.experts(self, router=linears.get("gate"), trained=trains_experts)
        return DecoderLayer(linears=linears, experts=experts, norms=norms, kernels=self.kernels, inputs=inputs)

    def _norm(self, name: str, numel: int, *, trained: bool) -> Weight:
        """A norm's weight; `upcast_layernorm` makes it float32 whether it is trained or not, DeepSpeed undoes it."""
        if self.run.upcast_layernorm and not trained and self.run.deepspeed is None:
            return Weight(numel, FLOAT32, self.booked)
        return self.weight(name, numel, trained=trained)

    def linear(self, name: str, linear: parameters.LinearShape, *, trained: bool) -> Linear:
        """A linear layer, quantized and with an adapter where the run wants it so."""
        weight = self.weight(name, linear.numel, trained=trained, width=linear.in_features)
        lora, oft = self.run.finetuning_type == "lora", self.run.finetuning_type == "oft"
        return Linear(
            weight=weight,
            quantization=self._quantization(),
            lora=self._lora(name, linear) if lora else None,
            oft=self._oft(name, linear) if oft else None,
            bypassed=self.bypassed,
        )

    def _quantization(self) -> Quantization | None:
        kind = quantization(self.run, self.shape)
        if kind is None:
            return None
        return Quantization(bits=kind.bits, compute_dtype=self.precision.compute, bitsandbytes=kind.method == "bnb")

    def _oft(self, name: str, linear: parameters.LinearShape) -> Oft | None:
        if name not in self.targets:
            return None
        count, size = parameters.oft_blocks(self.run, linear)
        weight = self._adapter(f"{name}.oft", count * parameters.oft_angles(size))
        return Oft(weight=weight, block_size=size)

    def _lora(self, name: str, linear: parameters.LinearShape) -> Lora | None:
        if name not in self.targets:
            return None
        rank = self.run.lora_rank
        a = self._adapter(f"{name}.a", rank * linear.in_features, width=linear.in_features)
        b = self._adapter(f"{name}.b", rank * linear.out_features, width=rank)
        magnitude = self._adapter(f"{name}.m", linear.out_features) if self.run.use_dora else None
        dropout = 0.0 if self.run.stage in ("dpo", "kto") else self.run.lora_dropout  # LLaMA-Factory switches it off
        return Lora(a=a, b=b, dropout=dropout, magnitude=magnitude)
