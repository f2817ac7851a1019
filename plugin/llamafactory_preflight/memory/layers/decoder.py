"""A decoder layer on paper: transformers' or liger's modelling code around PEFT's and bitsandbytes' linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamafactory_preflight.memory.layers import attention, norms
from llamafactory_preflight.memory.layers.adapters import Linear
from llamafactory_preflight.memory.layers.attention import AttentionCall
from llamafactory_preflight.memory.layers.expert_list import ExpertList
from llamafactory_preflight.memory.layers.experts import Experts
from llamafactory_preflight.memory.layers.mlp import gated_mlp
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Tensor
from llamafactory_preflight.memory.paper.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which implementation of each part the run uses."""

    liger: bool
    attention: str
    """`sdpa`, `fa2` or `eager`."""
    wide_norm: bool
    """Norms compute to their end in float32 (Gemma)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What every layer gets beside the hidden states: made once a micro-step, alive until its backward ends."""

    call: AttentionCall
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    waiting_masks: Tensor
    ids: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and a gated MLP; `sandwich` adds Gemma's norms behind both."""

    linears: Mapping[str, Linear]
    experts: Experts | ExpertList | None
    norms: Mapping[str, Weight]
    kernels: Kernels
    inputs: Inputs

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Runs the layer on the hidden states of one micro-batch."""
        ops.begin_container()
        h = self._attention_block(ops, x)
        return ops.end_container(self._mlp_block(ops, h))

    def norm(self, ops: Ops, x: Tensor, name: str) -> Tensor:
        """RMSNorm `name`, liger's or transformers'."""
        return self.norm_with(ops, x, self.norms[name])

    def norm_with(self, ops: Ops, x: Tensor, weight: Weight) -> Tensor:
        """RMSNorm with a given weight."""
        return ops.module(x, weight, lambda x: self._norm_with(ops, x, weight))

    def _norm_with(self, ops: Ops, x: Tensor, weight: Weight) -> Tensor:
        if self.kernels.liger:
            return norms.liger_rms_norm(ops, x, weight, in_place=not self.kernels.wide_norm)
        return norms.wide_rms_norm(ops, x, weight) if self.kernels.wide_norm else norms.rms_norm(ops, x, weight)

    def _attention_block(self, ops: Ops, x: Tensor) -> Tensor:
        hidden = self.norm(ops, x, "input_layernorm")
        hidden = self._attention(ops, hidden)
        if "post_attention_norm" in self.norms:
            hidden = self.norm(ops, hidden, "post_attention_norm")
        return ops.add(x, hidden)

    def _mlp_block(self, ops: Ops, h: Tensor) -> Tensor:
        hidden = self.norm(ops, h, "pre_mlp_norm")
        hidden = self._mlp(ops, hidden)
        if "post_mlp_norm" in self.norms:
            hidden = self.norm(ops, hidden, "post_mlp_norm")
        return ops.add(h, hidden)

    def _attention(self, ops: Ops, hidden: Tensor) -> Tensor:
        ops.begin_container()
        q = self._projected(ops, hidden, "q_proj", "q_norm")
        k = self._projected(ops, hidden, "k_proj", "k_norm")
        v = self.linears["v_proj"](ops, hidden)
        if not self.kernels.liger:  # liger rotates in place, forward and backward
            cos, sin = self.inputs.cos, self.inputs.sin
            q, k = attention.rotate(ops, q, cos, sin), attention.rotate(ops, k, cos, sin)
        out = self._attend(ops, q, k, v)
        return ops.end_container(self.linears["o_proj"](ops, out))

    def _projected(self, ops: Ops, hidden: Tensor, linear: str, norm: str) -> Tensor:
        x = self.linears[linear](ops, hidden)
        return self.norm(ops, x, norm) if norm in self.norms else x

    def _attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, call = self.inputs.mask, self.inputs.call
        if self.kernels.attention == "eager":
            assert mask is not None
            return attention.eager(ops, q, k, v, mask, call)
        if self.kernels.attention == "sdpa" and mask is not None:
            return attention.efficient(ops, q, k, v, mask, call)
        return attention.flash(ops, q, k, v, call)

    def _mlp(self, ops: Ops, hidden: Tensor) -> Tensor:
        if self.experts is not None:
            return self.experts(ops, hidden)
        return gated_mlp(ops, self.linears, hidden, liger=self.kernels.liger)
