"""Experts as a list of MLPs (transformers 4): the formula counts what real steps on the CPU allocated."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.memory import Card, estimate
from llamafactory_preflight.memory.card import cublas_workspace
from llamafactory_preflight.memory.result import MemoryEstimate
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import from_arguments
from llamafactory_preflight.software import Software


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import count_experts  # noqa: E402
from count_experts import ARGUMENTS, CASES, CONFIG  # noqa: E402


TABLE = json.loads(count_experts.TABLE.read_text())
ROWS = {(row["name"], row["even"]): row for row in TABLE["rows"]}
SOFTWARE = Software(**TABLE["software"])
TOLERANCE = 0.01
QWEN3_30B_A3B: dict[str, Any] = CONFIG | {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


def predict(config: dict[str, Any], software: Software = SOFTWARE, **changes: Any) -> MemoryEstimate:
    run = from_arguments(ARGUMENTS | changes, software=software, origin="here")
    return estimate(run, ModelShape.from_config(CONFIG | config), software=software, card=Card())


def predict_bytes(config: dict[str, Any], changes: dict[str, Any]) -> int:
    """Forward and backward without the workspaces that a card has and a CPU has not."""
    return predict(config, **changes).phases["forward_backward"] - 2 * cublas_workspace(Card().compute_capability)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_counts_what_a_real_step_allocates(name: str) -> None:
    row, (config, changes) = ROWS[name, True], CASES[name]
    assert (row["config"], row["args"]) == (config, changes)  # the table is that of the cases as they stand
    assert predict_bytes(config, changes) == pytest.approx(row["bytes"], rel=TOLERANCE)


@pytest.mark.skipif(Software.installed().at_least("transformers", 5), reason="experts are listed by transformers 4")
@pytest.mark.parametrize("name", ["adapters everywhere", "full in bf16"])
def test_a_real_step_allocates_what_the_table_says(name: str) -> None:
    assert count_experts.count(*CASES[name]) == pytest.approx(ROWS[name, True]["bytes"], rel=1e-3)


@pytest.mark.parametrize("name", count_experts.UNEVEN)
def test_a_router_that_prefers_some_experts_takes_hardly_more(name: str) -> None:
    assert ROWS[name, False]["bytes"] <= 1.03 * ROWS[name, True]["bytes"]


def test_all_means_every_expert_and_the_router() -> None:
    everywhere, attention = (
        predict(QWEN3_30B_A3B, lora_target=target, lora_rank=8).components["adapters"]
        for target in ("all", "q_proj,k_proj,v_proj,o_proj")
    )
    per_layer = 128 * 3 * 8 * (2048 + 768) + 8 * (2048 + 128)
    assert everywhere - attention == 48 * per_layer * 4


def test_small_adapters_are_rounded_up_one_by_one() -> None:
    found = predict({"hidden_size": 40, "moe_intermediate_size": 24, "num_attention_heads": 1}, lora_rank=1)
    assert found.components["adapters"] == 512 * (3 * 2 * (5 + 3 * 16))


def test_bitsandbytes_quantizes_experts_that_are_linear_layers() -> None:
    four = predict(QWEN3_30B_A3B, quantization_bit=4)
    five = predict(QWEN3_30B_A3B, replace(SOFTWARE, transformers="5.6.0"), quantization_bit=4)
    assert four.components["weights"] < 17 * 2**30 < 50 * 2**30 < five.components["weights"]


def test_few_tokens_reach_few_experts() -> None:
    assert predict({"num_experts": 128}, cutoff_len=8).phases["forward_backward"] > 0
