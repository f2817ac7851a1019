"""What a run may ask for: each method, stage, loop and model has a prediction, or is `unknown` and says why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import preflight
from test_memory import MOE, QWEN3, VISION


QLORA = {"quantization_bit": 4}
FULL = {"finetuning_type": "full"}
PREDICTED: Mapping[str, dict[str, Any]] = {
    # methods
    "full with float32 masters": FULL | {"bf16": True},
    "full in fp16": FULL | {"bf16": False, "fp16": True},
    "full in pure bf16": FULL | {"bf16": False, "pure_bf16": True},
    "the last layers": {"finetuning_type": "freeze", "freeze_trainable_layers": 4},
    "the first layers": {"finetuning_type": "freeze", "freeze_trainable_layers": -4},
    "modules of layers": {"finetuning_type": "freeze", "freeze_trainable_modules": "self_attn"},
    "extra modules": {"finetuning_type": "freeze", "freeze_extra_modules": "embed_tokens"},
    "lora of a rank": {"lora_rank": 128},
    "lora of targets": {"lora_target": "q_proj,v_proj"},
    "lora with a whole module": {"additional_target": "embed_tokens,lm_head"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"pissa_init": True},
    "lora+": {"loraplus_lr_ratio": 16.0},
    "oft": {"finetuning_type": "oft"},
    "4 bit": QLORA,
    "4 bit without double quantization": QLORA | {"double_quantization": False},
    "8 bit": {"quantization_bit": 8},
    "hqq": QLORA | {"quantization_method": "hqq"},
    "on an adapter": {"adapter_name_or_path": "adapter"},
    # stages
    "pt": {"stage": "pt"},
    "rm": {"stage": "rm"},
    "dpo": {"stage": "dpo"},
    "dpo with a reference model": FULL | {"stage": "dpo"},
    "orpo": {"stage": "dpo", "pref_loss": "orpo"},
    "simpo": {"stage": "dpo", "pref_loss": "simpo"},
    "kto": {"stage": "kto"},
    # the loop
    "packing": {"packing": True},
    "neat packing": {"neat_packing": True},
    "without checkpointing": {"disable_gradient_checkpointing": True},
    "checkpointing that is not reentrant": {"use_reentrant_gc": False},
    "unsloth's checkpointing": {"use_unsloth_gc": True},
    "liger": {"enable_liger_kernel": True},
    "sdpa": {"flash_attn": "sdpa"},
    "fa2": {"flash_attn": "fa2"},
    "eager": {"flash_attn": "disabled"},
    "neftune": {"neftune_noise_alpha": 5.0},
    **{name: {"optim": name} for name in (
        "adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
        "adafactor", "lion_32bit", "lion_8bit", "paged_lion_8bit", "sgd",
    )},
    "galore": FULL | {"use_galore": True, "optim": "adamw_torch", "bf16": False, "pure_bf16": True},
    "apollo": FULL | {"use_apollo": True, "optim": "adamw_torch", "bf16": False, "pure_bf16": True},
    "badam": FULL | {"use_badam": True},
    "badam from the last layer": FULL | {"use_badam": True, "badam_switch_mode": "descending", "max_steps": 99},
    "badam at random": FULL | {"use_badam": True, "badam_switch_mode": "random", "optim": "adamw_torch"},
    "muon": FULL | {"use_muon": True},
    "evaluation": {"val_size": 0.1, "eval_strategy": "steps"},
    "evaluation by generating": {"val_size": 0.1, "do_eval": True, "predict_with_generate": True},
}  # fmt: skip
UNKNOWN: Mapping[str, tuple[dict[str, Any], str]] = {
    "ppo": ({"stage": "ppo"}, "PPO"),
    "unsloth": ({"use_unsloth": True}, "use_unsloth"),
    "ktransformers": ({"use_kt": True}, "use_kt"),
    "fp8": ({"fp8": True}, "fp8"),
    "hyperparallel": ({"use_hyper_parallel": True}, "use_hyper_parallel"),
    "megatron's adapter": ({"use_mca": True}, "use_mca"),
    "badam by ratio": (FULL | {"use_badam": True, "badam_mode": "ratio"}, "badam_mode: ratio"),
    "badam on the last layers": ({"finetuning_type": "freeze", "use_badam": True}, "finetuning_type: freeze"),
    "badam of pairs": (FULL | {"use_badam": True, "stage": "dpo"}, "stage `dpo`"),
    "badam in fp16": (FULL | {"use_badam": True, "bf16": False, "fp16": True}, "bfloat16"),
    "badam in 8 bit": (FULL | {"use_badam": True, "optim": "adamw_8bit"}, "torch's AdamW"),
    "adam-mini": (FULL | {"use_adam_mini": True}, "use_adam_mini"),
}
TEXT: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: Mapping[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3_moe": MOE,
    "qwen3_vl": VISION,
    "qwen2": TEXT | {"model_type": "qwen2", "vocab_size": 151936},
    "llama": TEXT | {"model_type": "llama"},
    "llama with biases": TEXT | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": TEXT | {"model_type": "mistral", "head_dim": 160, "vocab_size": 131072},
    "mistral with a window": TEXT | {"model_type": "mistral", "sliding_window": 4096, "vocab_size": 32000},
    "gemma3_text": TEXT | {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512, "vocab_size": 262144,
                           "sliding_window_pattern": 6, "tie_word_embeddings": True},
    "gptq": QWEN3 | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "awq": QWEN3 | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
}  # fmt: skip


def looked(folder: Path, config: Mapping[str, Any], **settings: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    given = {"model_name_or_path": str(folder), "do_train": True, "bf16": True, "dataset": "rows", "template": "qwen3"}
    return preflight.check(given | {"output_dir": "out"} | settings, gpu="rtx5090", host_ram="256GiB")


@pytest.mark.parametrize("name", PREDICTED)
def test_a_setting_is_predicted(name: str, tmp_path: Path) -> None:
    result = looked(tmp_path, QWEN3, **PREDICTED[name])
    assert result.verdict.word != "unknown", result.verdict.reasons
    assert sum(result.estimate.components.values()) == result.estimate.peak_allocated_bytes > 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_another_setting_is_unknown_and_named(name: str, tmp_path: Path) -> None:
    settings, word = UNKNOWN[name]
    result = looked(tmp_path, QWEN3, **settings)
    assert (result.verdict.word, result.estimate, result.remedies) == ("unknown", None, ())
    assert word.lower() in result.verdict.reasons[0].lower()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_predicted(name: str, tmp_path: Path) -> None:
    result = looked(tmp_path, MODELS[name])
    assert result.verdict.word != "unknown", result.verdict.reasons
    assert result.estimate.components["weights"] > 0
