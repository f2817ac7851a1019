"""Dimensions of the Qwen3 language models, from their `config.json` on the hub, for where no hub is reached."""

from __future__ import annotations

import re
from typing import Any


MADE_HERE = "saves/tiny-qwen3"
"""The model of presets/cpu_smoke.yaml, which no hub has."""
VOCABULARY_SIZE = 151936
# Size: hidden size, layers, heads, key-value heads, MLP width, tied embeddings.
DENSE = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
    "30B-A3B": (2048, 48, 32, 4, 6144, False),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
}
NAME = re.compile(rf"Qwen/Qwen3-({'|'.join(map(re.escape, DENSE))})(-Base|-Instruct-2507|-Thinking-2507)?")


def size(name: str) -> str | None:
    """The size in a model's name as the hub spells it (`8B` of `Qwen/Qwen3-8B-Base`), or None for other models."""
    match = NAME.fullmatch(name)
    return match[1] if match else None


def config(name: str) -> dict[str, Any] | None:
    """What a model's `config.json` says, as far as a training depends on it, or None for other models."""
    known = size(name)
    if known is None:
        return None
    hidden, layers, heads, key_value_heads, width, tied = DENSE[known]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": width,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY_SIZE,
    } | EXPERTS.get(known, {})
