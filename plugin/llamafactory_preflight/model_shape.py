"""The shape of a decoder, read from its config.json: all that memory depends on, no weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Expert layers of a mixture-of-experts decoder."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    num_dense_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only language model's dimensions; sizes are element counts."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    max_position_embeddings: int
