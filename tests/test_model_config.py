from __future__ import annotations

from typing import Any

import pytest

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.model import config as model_config


CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "quantization_config": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "moe"),
    [
        (CONFIG, False),
        (CONFIG | EXPERTS, True),
        (CONFIG | {"num_key_value_heads": None, "head_dim": None}, False),
        ({"model_type": "qwen3_vl", "text_config": CONFIG, "vision_config": {}}, False),
        ({}, False),
    ],
)
def test_what_models_have(config: dict[str, Any], moe: bool) -> None:
    model_config.check(config, place="here", moe=moe)


@pytest.mark.parametrize(
    ("change", "moe", "message"),
    [
        ({"hidden_size": "64"}, False, r"`hidden_size` is '64', not a size \(here\)"),
        ({"num_attention_heads": 0, "vocab_size": -1}, False, "`num_attention_heads` is 0.*`vocab_size` is -1"),
        ({"num_hidden_layers": True}, False, "`num_hidden_layers` is True"),
        ({"hidden_size": 10**30}, False, "not a size"),
        ({"hidden_size": 64.5}, False, "not a size"),
        ({"num_key_value_heads": 3}, False, "4 `num_attention_heads` cannot share 3"),
        ({"quantization_config": "gptq"}, False, "`quantization_config` is no object"),
        ({"text_config": [1]}, False, "`text_config` is no object"),
        ({"text_config": {"hidden_size": 0}}, False, "`hidden_size` is 0"),
        ({}, True, "`num_experts` is None"),
    ],
)
def test_what_no_model_has(change: dict[str, Any], moe: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_config.check(CONFIG | change, place="here", moe=moe)
