"""Checks a config.json before sizes are computed from it: a file edited by hand gives no figure that looks right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import joined, phrase


SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
SECTIONS = ("text_config", "vision_config", "quantization_config")
LARGEST = 2**31 - 1


def check(config: Mapping[str, Any], *, place: str, moe: bool) -> None:
    """Looks at the values that sizes depend on; what is absent is left to whoever needs it.

    Args:
        config: The parsed config.json of a model type that is known here.
        place: Where it was read, for the message.
        moe: Whether its layers are experts, so that their sizes must be there.

    Raises:
        UserError: One message with every value that no model can have.
    """
    problems = list(_problems(config, moe=moe))
    if problems:
        raise UserError(
            phrase("In config.json {problems}", problems=joined("; ", problems)),
            where=place,
            next_step="Download the file again",
        )


def _problems(config: Mapping[str, Any], *, moe: bool) -> Iterator[str]:
    for name in SECTIONS:
        if not isinstance(config.get(name) or {}, Mapping):
            yield phrase("`{name}` is no object", name=name)
            return
    sizes = {**config, **(config.get("text_config") or {})}
    faulty = False
    for name in SIZES:
        value = sizes.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST
        if not whole and (value is not None or (moe and name in EXPERTS)):
            faulty = True
            yield phrase("`{name}` is {value}, not a size", name=name, value=repr(value))
    heads, shared = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if not faulty and heads and shared and heads % shared:
        yield phrase(
            "{heads} `num_attention_heads` cannot share {shared} `num_key_value_heads`", heads=heads, shared=shared
        )
