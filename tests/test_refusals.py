"""Every path that has no formula is named: each sentence of the refusals is provoked, by the run that it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import memory
from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import Ranks, badam, fsdp_refusals, refusals
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software
from test_fsdp import config
from test_memory import MOE, QWEN3, VISION


SOFTWARE = Software(torch="2.9.1", transformers="5.6.0", deepspeed="0.18.4", liger_kernel="0.8.5", accelerate="1.11.0")
OLD = Software(torch="2.9.1", transformers="4.57.1", deepspeed="0.18.4", accelerate="1.11.0")
PICTURE = Images(patches=(256,), exact=True, reason="given")
FLOAT32 = QWEN3 | {"dtype": "float32"}


def plan(stage: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed": {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, **more}}}


def launched(**section: Any) -> dict[str, Any]:
    return {"accelerate": fsdp.from_accelerate(config(**section), origin="fsdp.yaml")}


FULL = {"finetuning_type": "full"}
BADAM = FULL | {"use_badam": True}
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any], Software, Images | None]] = {
    "Runs with `use_unsloth` have no formula": ({"use_unsloth": True}, QWEN3, SOFTWARE, None),
    "What `add_tokens` does to memory": ({"unmodelled": ("add_tokens",)}, QWEN3, SOFTWARE, None),
    "PPO": ({"stage": "ppo"}, QWEN3, SOFTWARE, None),
    "`label_smoothing_factor`": ({"label_smoothing_factor": 0.1}, VISION, SOFTWARE, None),
    "`pref_ftx`": ({"stage": "dpo", "pref_ftx": 0.1}, QWEN3, SOFTWARE, None),
    "A reference model of another name": ({"stage": "dpo", "ref_model": "other"}, QWEN3, SOFTWARE, None),
    "Quantized weights are not trained": (FULL | {"quantization_bit": 4}, QWEN3, SOFTWARE, None),
    "Which transformers": ({}, MOE, Software(), None),
    "Vision models with experts": (
        {}, VISION | {"model_type": "qwen3_vl_moe", "text_config": MOE}, OLD, None,
    ),
    "Under transformers 4, freeze tuning": ({"finetuning_type": "freeze"}, MOE, OLD, None),
    "DoRA on a list of experts": ({"use_dora": True}, MOE, OLD, None),
    "OFT on a mixture": ({"finetuning_type": "oft"}, MOE, SOFTWARE, None),
    "Training the vision tower": ({"freeze_vision_tower": False}, VISION, SOFTWARE, None),
    "Training a vision model without": ({"freeze_language_model": True}, VISION, SOFTWARE, None),
    "Neat packing of a vision model": ({"neat_packing": True}, VISION, SOFTWARE, None),
    "in the DeepSpeed JSON": (plan(3, zero_hpz_partition_size=8), QWEN3, SOFTWARE, None),
    "Quantized weights with offloading to NVMe": (
        plan(3, offload_param={"device": "nvme"}) | {"quantization_bit": 4}, QWEN3, SOFTWARE, None,
    ),
    "a second model and parameters on an NVMe": (
        plan(3, offload_param={"device": "nvme"}) | FULL | {"stage": "dpo"}, QWEN3, SOFTWARE, None,
    ),
    "DeepSpeed in float32": (plan(2) | {"bf16": False}, QWEN3, SOFTWARE, None),
    "`additional_target` in a preference stage": (
        plan(3) | {"stage": "dpo", "additional_target": ("embed_tokens",)}, QWEN3, SOFTWARE, None,
    ),
    "A reward model whose language head": (
        plan(2) | FULL | {"stage": "rm"}, QWEN3 | {"tie_word_embeddings": False}, SOFTWARE, None,
    ),
    "OFT and DoRA under DeepSpeed": (plan(2) | {"use_dora": True}, QWEN3, SOFTWARE, None),
    "A vision model under ZeRO-3": (plan(3), VISION, SOFTWARE, None),
    "Training experts under ZeRO-3": (plan(3) | FULL, MOE, SOFTWARE, None),
    "A second model with experts": (
        plan(3) | {"stage": "dpo", "ref_model": "m", "model_name_or_path": "m"}, MOE, SOFTWARE, None,
    ),
    "The experts of transformers 4": (plan(3), MOE, OLD, None),
    "Under ZeRO-3 LLaMA-Factory takes": (plan(3) | {"quantization_bit": 8}, QWEN3, SOFTWARE, None),
    "4 bit under ZeRO-3": (plan(3) | {"quantization_bit": 4, "stage": "dpo"}, QWEN3, SOFTWARE, None),
    "Images under transformers 4": ({}, VISION, OLD, PICTURE),
    "What images take in qwen3": ({}, QWEN3, SOFTWARE, PICTURE),
    "Images in stage `dpo`": ({"stage": "dpo"}, VISION, SOFTWARE, PICTURE),
    "Packed samples with images": ({"packing": True}, VISION, SOFTWARE, PICTURE),
    "Answers to images": ({"predict_with_generate": True}, VISION, SOFTWARE, PICTURE),
    "What the Trainer's own gradient checkpointing": (
        {"gradient_checkpointing": True, "disable_gradient_checkpointing": True}, VISION, SOFTWARE, PICTURE,
    ),
    "What `fsdp_sharding_strategy: HYBRID_SHARD`": (launched(sharding_strategy="HYBRID_SHARD"), QWEN3, SOFTWARE, None),
    "BAdam with `finetuning_type: lora`": ({"use_badam": True}, QWEN3, SOFTWARE, None),
    "BAdam with `badam_mode: ratio`": (BADAM | {"badam_mode": "ratio"}, QWEN3, SOFTWARE, None),
    "BAdam in stage `rm`": (BADAM | {"stage": "rm"}, QWEN3, SOFTWARE, None),
    "BAdam under DeepSpeed": (BADAM | plan(3), QWEN3, SOFTWARE, None),
    "BAdam on experts": (BADAM, MOE, SOFTWARE, None),
    "BAdam has a formula for checkpoints": (BADAM, FLOAT32, SOFTWARE, None),
    "BAdam has a formula around": (BADAM | {"optim": "adamw_8bit"}, QWEN3, SOFTWARE, None),
    "BAdam with `upcast_layernorm`": (BADAM | {"upcast_layernorm": True}, QWEN3, SOFTWARE, None),
    "BAdam knows no": (BADAM | {"badam_switch_mode": None}, QWEN3, SOFTWARE, None),
    "BAdam fails without a `badam_switch_interval`": (BADAM | {"badam_switch_interval": 0}, QWEN3, SOFTWARE, None),
    "BAdam fails with `badam_switch_mode: fixed`": (BADAM | {"badam_switch_mode": "fixed"}, QWEN3, SOFTWARE, None),
    "BAdam fails with `badam_start_block: 99`": (BADAM | {"badam_start_block": 99}, QWEN3, SOFTWARE, None),
    "BAdam on several GPUs": (BADAM, QWEN3, SOFTWARE, None),
    "FSDP without bf16": (launched() | {"bf16": False, "fp16": True}, QWEN3, SOFTWARE, None),
    "FSDP with a checkpoint that is not": (launched(), FLOAT32, SOFTWARE, None),
    "Stage `kto` or generation under FSDP": (launched() | {"stage": "kto"}, QWEN3, SOFTWARE, None),
    "FSDP has a formula for full tuning": (launched() | {"use_dora": True}, QWEN3, SOFTWARE, None),
    "Experts and vision models under FSDP": (launched(), MOE, SOFTWARE, None),
    "`upcast_layernorm` and `upcast_lmhead_output`": (launched() | {"upcast_layernorm": True}, QWEN3, SOFTWARE, None),
    "Optimizer `adamw_8bit` under FSDP": (launched() | FULL | {"optim": "adamw_8bit"}, QWEN3, SOFTWARE, None),
    "FSDP under transformers 4": (launched(), QWEN3, OLD, None),
    "Quantized weights under FSDP": (launched(version=2) | {"quantization_bit": 4}, QWEN3, SOFTWARE, None),
    "FSDP 2 with reentrant": (launched(version=2) | {"use_unsloth_gc": True}, QWEN3, SOFTWARE, None),
}  # fmt: skip


def said(case: str) -> str:
    settings, model, software, pictures = CASES[case]
    base = {"model_name_or_path": "m", "do_train": True, "bf16": True, "template": "qwen3_vl", "cutoff_len": 64}
    run = RunDescription(**(base | settings))
    shape, ranks = ModelShape.from_config(model), Ranks(world=2, local=2)
    with pytest.raises(Unmodelled) as caught:
        memory.estimate(run, shape, software=software, ranks=ranks, images=pictures)
    return str(caught.value.reason)


@pytest.mark.parametrize("case", CASES)
def test_a_path_without_a_formula_is_named(case: str) -> None:
    assert case in said(case)


def sentences() -> Iterator[str]:
    """Each sentence that the refusals yield, as a regular expression."""
    for module in (refusals, fsdp_refusals, badam):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Yield) or node.value is None:
                continue
            if isinstance(node.value, ast.Call) and not node.value.args:  # no sentence
                continue
            text = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            if isinstance(text, ast.Constant):
                yield ".*".join(map(re.escape, re.split(r"\{\w+\}", str(text.value))))
            elif isinstance(text, ast.JoinedStr):
                yield "".join(
                    re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in text.values
                )


def test_every_sentence_of_the_refusals_is_provoked() -> None:
    found, expected = [said(case) for case in CASES], list(sentences())
    assert len(expected) >= 35
    assert [pattern for pattern in expected if not any(re.fullmatch(pattern, text) for text in found)] == []
