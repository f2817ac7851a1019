"""The dimensions of the Qwen3 models that presets name, and a `config.json` of each: no download."""

from __future__ import annotations

from typing import Any

from llamafactory_preflight.model import known_models
from llamafactory_preflight.model.known_models import DENSE, EXPERTS, VOCABULARY_SIZE


# What a model is built with; the numbers of tokens are those of the tokenizer that measure_runs.py makes.
BUILT_WITH = {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.02}


def config(name: str) -> dict[str, Any]:
    """What a model's `config.json` says, as far as a training depends on it.

    Args:
        name: The model as the hub calls it.

    Raises:
        KeyError: It is not a Qwen3 language model of a known size.
    """
    found = known_models.config(name)
    if found is None:
        raise KeyError(name)
    return found | BUILT_WITH


def parameters(name: str) -> tuple[int, int]:
    """Weights that a token passes through in matrix products, the head included, and attention width times layers.

    Returns:
        Active weights (the embedding's look-up left out), and `heads * head_dim * layers` for attention's share.
    """
    size = known_models.size(name)
    if size is None:
        raise KeyError(name)
    hidden, layers, heads, key_value_heads, width, _ = DENSE[size]
    attention = hidden * 128 * (2 * heads + 2 * key_value_heads)
    experts = EXPERTS.get(size)
    active = experts["num_experts_per_tok"] * experts["moe_intermediate_size"] if experts else width
    return layers * (attention + 3 * hidden * active) + VOCABULARY_SIZE * hidden, heads * 128 * layers
