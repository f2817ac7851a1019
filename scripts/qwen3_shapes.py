"""The dimensions of the Qwen3 models that presets name, and a `config.json` of each: no download."""

from __future__ import annotations

from typing import Any


VOCABULARY_SIZE = 151936
# hidden size, layers, heads, key-value heads, MLP width, tied embeddings; as their config.json on the hub says
DENSE = {
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-14B": (5120, 40, 40, 8, 17408, False),
    "Qwen/Qwen3-32B": (5120, 64, 64, 8, 25600, False),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2048, 48, 32, 4, 6144, False),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
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


def config(name: str) -> dict[str, Any]:
    """What a model's `config.json` says, as far as a training depends on it.

    Args:
        name: The model as the hub calls it.

    Raises:
        KeyError: It is not one of those here.
    """
    hidden, layers, heads, key_value_heads, width, tied = DENSE[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
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
    } | EXPERTS.get(name, {})


def parameters(name: str) -> tuple[int, int]:
    """Weights that a token passes through in matrix products, the head included, and attention width times layers.

    Returns:
        Active weights (the embedding's look-up left out), and `heads * head_dim * layers` for attention's share.
    """
    hidden, layers, heads, key_value_heads, width, _ = DENSE[name]
    attention = hidden * 128 * (2 * heads + 2 * key_value_heads)
    experts = EXPERTS.get(name)
    active = experts["num_experts_per_tok"] * experts["moe_intermediate_size"] if experts else width
    return layers * (attention + 3 * hidden * active) + VOCABULARY_SIZE * hidden, heads * 128 * layers
