"""Contradictory settings: what transformers and LLaMA-Factory refuse is refused, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations import deepspeed as transformers_deepspeed

from llamafactory_preflight import preflight
from llamafactory_preflight.advice import contradictions
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


SMALL = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 1000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
ENABLED: tuple[Any, ...] = (None, "auto", True, False)
ZERO3 = {"zero_optimization": {"stage": 3}}


class TrainersConfig(transformers_deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):  # type: ignore[misc]
    """What transformers makes of a JSON, without its look for DeepSpeed itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        HfDeepSpeedConfig.__init__(self, config)
        self._dtype, self.mismatches = None, []


def refusal(**settings: Any) -> str | None:
    try:
        contradictions.refuse(RunDescription(model_name_or_path="m", **settings))
    except UserError as error:
        return str(error)
    return None


def theirs(folder: Path, config: dict[str, Any] | None, **precision: bool) -> bool:
    """Whether transformers refuses the precision, of the arguments or beside the JSON."""
    try:
        args = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True, **precision)
    except ValueError:
        return True
    if config is None:
        return False
    read = TrainersConfig(config)
    read.trainer_config_process(args)
    return any(line.startswith(("- ds bf16", "- ds fp16")) for line in read.mismatches)


def configs() -> Iterator[dict[str, Any] | None]:
    yield None
    for bf16, fp16 in itertools.product(ENABLED, ENABLED):
        named = {"bf16": bf16, "fp16": fp16}
        yield {name: {"enabled": value} for name, value in named.items() if value is not None}


@pytest.mark.parametrize("config", list(configs()), ids=str)
def test_precision_is_refused_where_transformers_refuses_it(tmp_path: Path, config: dict[str, Any] | None) -> None:
    for bf16, fp16, full_eval in itertools.product((False, True), repeat=3):
        precision = {"bf16": bf16, "fp16": fp16, "bf16_full_eval": full_eval}
        ours = refusal(deepspeed=config, **precision)
        assert (ours is not None) is theirs(tmp_path, config, **precision), (precision, ours)


def test_pure_bf16_with_fp16_is_left_to_train_as_llamafactory_does() -> None:
    assert refusal(pure_bf16=True, fp16=True, finetuning_type="full") is None


def test_the_message_names_key_value_and_a_way_out() -> None:
    message = refusal(bf16=True, deepspeed={"bf16": {"enabled": False}})
    assert message is not None
    assert "`bf16.enabled: false`" in message and "`bf16: true`" in message and '"auto"' in message


@pytest.fixture
def under_zero3() -> Iterator[HfDeepSpeedConfig]:
    """transformers knows of a JSON with ZeRO-3, as it does while LLaMA-Factory loads the model."""
    config = HfDeepSpeedConfig(ZERO3)
    transformers_deepspeed.set_hf_deepspeed_config(config)
    yield config
    transformers_deepspeed.unset_hf_deepspeed_config()


QUANTIZED = [("bnb", 4), ("bnb", 8), ("hqq", 4), ("eetq", 8)]


@pytest.mark.parametrize(("method", "bits"), QUANTIZED)
def test_quantization_under_zero3_is_refused_where_llamafactory_refuses_it(
    under_zero3: HfDeepSpeedConfig, method: str, bits: int
) -> None:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.quantization import configure_quantization
    from transformers import Qwen3Config

    args = ModelArguments(model_name_or_path="m", quantization_method=method, quantization_bit=bits)
    refused = False
    try:
        configure_quantization(Qwen3Config(), None, args, True, {})
    except ValueError:
        refused = True
    ours = refusal(deepspeed=ZERO3, bf16=True, quantization_method=method, quantization_bit=bits)
    assert refused is (ours is not None) is ((method, bits) != ("bnb", 4))


def test_a_quantized_checkpoint_under_zero3_is_refused_where_llamafactory_refuses_it(
    under_zero3: HfDeepSpeedConfig,
) -> None:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.quantization import configure_quantization
    from transformers import Qwen3Config

    config = Qwen3Config(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="PTQ-quantized"):
        configure_quantization(config, None, ModelArguments(model_name_or_path="m"), True, {})
    shape = ModelShape.from_config(SMALL)
    quantized = replace(shape, quantization_method="gptq")
    run = RunDescription(model_name_or_path="m", deepspeed=ZERO3)
    with pytest.raises(UserError, match="quantized already"):
        contradictions.refuse_model(run, quantized)
    contradictions.refuse_model(run, shape)
    contradictions.refuse_model(RunDescription(model_name_or_path="m"), quantized)


def test_a_preflight_ends_with_the_refusal() -> None:
    given = {
        "model_name_or_path": "m",
        "dataset": "d",
        "do_train": True,
        "output_dir": "o",
        "bf16": True,
        "fp16": True,
    }
    with pytest.raises(UserError, match="`bf16` and `fp16` are both true"):
        preflight.check(given, gpu="24GiB")
