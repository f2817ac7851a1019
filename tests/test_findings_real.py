"""What the findings say of LLaMA-Factory, transformers and bitsandbytes, asked of those that are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig, Trainer, TrainingArguments

from llamafactory_preflight import preflight
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.findings import arguments
from llamafactory_preflight.machine import checkpoint_size, disk
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
}  # fmt: skip


def qwen3() -> Any:
    return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))


def trained(tmp_path: Path, *, gradient_checkpointing: bool = True, **asked: Any) -> Any:
    """One step by LLaMA-Factory's preparation of the model and transformers' Trainer."""
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training

    model = qwen3()
    prepare_model_for_training(model, ModelArguments(model_name_or_path="x", **asked))
    row = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}
    training = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    Trainer(model=model, args=training, train_dataset=[row]).train()
    return model


def settings(function: Any) -> dict[str, Any]:
    """The keywords of the `partial` of torch's checkpoint, which LLaMA-Factory wraps in a closure."""
    while not isinstance(function, partial):
        function = function.__wrapped__
    return dict(function.keywords)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_turns_checkpointing_on_again(tmp_path: Path) -> None:
    disabled = trained(tmp_path, disable_gradient_checkpointing=True)
    assert disabled.is_gradient_checkpointing
    assert not trained(
        tmp_path, gradient_checkpointing=False, disable_gradient_checkpointing=True
    ).is_gradient_checkpointing


@pytest.mark.filterwarnings("ignore")
def test_and_makes_it_reentrant(tmp_path: Path) -> None:
    def kind(**asked: Any) -> Any:
        layer = trained(tmp_path, use_reentrant_gc=False, **asked).model.layers[0]
        return settings(layer._gradient_checkpointing_func)

    assert kind() == {"use_reentrant": True}
    assert kind(gradient_checkpointing=False) == {"use_reentrant": False}


@pytest.mark.filterwarnings("ignore")
def test_experts_are_not_quantized() -> None:
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        )
    replace_with_bnb_linear(model, ["lm_head"], BitsAndBytesConfig(load_in_4bit=True))
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, Linear4bit)
    assert not any(isinstance(module, Linear4bit) for module in layer.mlp.experts.modules())
    sizes = {name: parameter.numel() for name, parameter in layer.mlp.experts.named_parameters()}
    assert sizes == {"gate_up_proj": 4 * 2 * 32 * 64, "down_proj": 4 * 32 * 64}


def test_a_json_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.hparams import parser

    file = tmp_path / "a.json"
    file.write_text(json.dumps({"model_name_or_path": "x"}))
    (finding,) = arguments.json_file(str(file), Software.installed())
    assert finding.id == "json-not-read"
    monkeypatch.setattr("sys.argv", ["llamafactory-cli", str(file)])
    with pytest.raises(AttributeError, match="read"):
        parser.read_args()
    file.with_suffix(".yaml").write_text(file.read_text())
    monkeypatch.setattr("sys.argv", ["llamafactory-cli", str(file.with_suffix(".yaml"))])
    assert parser.read_args() == {"model_name_or_path": "x"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", ["foo", "fa3", "FA2"])
def test_kinds_of_attention_that_llamafactory_refuses_late(value: str) -> None:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.attention import configure_attn_implementation

    asked = ModelArguments(model_name_or_path="x", flash_attn=value)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="Unknown attention type"):
        configure_attn_implementation(Qwen3Config(**SIZES), asked)


@pytest.mark.filterwarnings("ignore")
def test_flash_attention_that_is_not_installed_is_passed_over() -> None:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.attention import configure_attn_implementation
    from transformers.utils import is_flash_attn_2_available

    assert not is_flash_attn_2_available() or Software.installed().flash_attn is not None
    config = Qwen3Config(**SIZES)
    configure_attn_implementation(config, ModelArguments(model_name_or_path="x", flash_attn="fa2"))  # type: ignore[arg-type]
    wanted = "flash_attention_2" if is_flash_attn_2_available() else None
    assert config._attn_implementation == wanted


@pytest.mark.filterwarnings("ignore")
def test_disabled_is_eager() -> None:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.attention import configure_attn_implementation

    config = Qwen3Config(**SIZES)
    configure_attn_implementation(config, ModelArguments(model_name_or_path="x", flash_attn="disabled"))  # type: ignore[arg-type]
    assert config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flash_attn": "foo"}, "`flash_attn` is 'foo', which is none of auto, disabled, sdpa, fa2"),
        ({"flash_attn": False}, "`flash_attn` is False, which is none of"),
        ({"quantization_method": "bnbb"}, "`quantization_method` is 'bnbb', which is none of bnb"),
        ({"rope_scaling": "dinamic"}, "`rope_scaling` is 'dinamic', which is none of linear"),
    ],
)
def test_values_that_no_enumeration_has_are_the_users_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight.check({"model_name_or_path": "x", **given}, gpu="24GiB")
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_samples", "batch", "accumulation", "epochs"), [(7, 2, 2, 2.5), (3, 4, 8, 1.0), (5, 1, 2, 0.3)]
)
def test_steps_are_counted_as_the_trainer_counts_them(
    tmp_path: Path, num_samples: int, batch: int, accumulation: int, epochs: float
) -> None:
    training = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=epochs, per_device_train_batch_size=batch, use_cpu=True,
        gradient_accumulation_steps=accumulation, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(3), "labels": torch.arange(3)} for _ in range(num_samples)]
    trainer = Trainer(model=qwen3(), args=training, train_dataset=rows)
    trainer.train()
    run = RunDescription(
        num_train_epochs=epochs, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation
    )
    assert checkpoint_size.with_steps(run, num_samples=num_samples, num_devices=1).max_steps == trainer.state.max_steps


class Kept:
    """Remembers the shapes of what an evaluation keeps until its end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from transformers.trainer_pt_utils import EvalLoopContainer

        self.shapes: set[tuple[tuple[int, ...], torch.dtype]] = set()
        add = EvalLoopContainer.add

        def remember(container: Any, tensor: Any) -> None:
            self.shapes.add((tuple(tensor.shape), tensor.dtype))
            add(container, tensor)

        patch.setattr(EvalLoopContainer, "add", remember)


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_keeps_token_numbers_with_metrics_and_losses_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory.train.sft.metric import ComputeAccuracy, eval_logit_processor

    kept = Kept(monkeypatch)
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)} for _ in range(4)]
    training = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=2, disable_tqdm=True
    )
    Trainer(model=qwen3(), args=training, eval_dataset=rows).evaluate()
    assert {shape for shape, _ in kept.shapes} == {(2,)}
    kept.shapes.clear()
    Trainer(
        model=qwen3(),
        args=training,
        eval_dataset=rows,
        compute_metrics=ComputeAccuracy(),
        preprocess_logits_for_metrics=eval_logit_processor,
    ).evaluate()
    assert ((2, 6), torch.int64) in kept.shapes, "8 bytes a token, of predictions and of labels"
    assert max(len(shape) for shape, _ in kept.shapes) == 2, "no logits"


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, scripts_on_path: Path
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Two steps of full tuning by the real command, each with a checkpoint."""
    import os
    import subprocess

    folder = tmp_path_factory.mktemp("saved")
    given = {
        "model_name_or_path": str(tiny_model), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "identity", "dataset_dir": str(Path(__file__).parents[1] / "presets/data"), "template": "qwen3",
        "cutoff_len": 32, "output_dir": str(folder / "out"), "max_steps": 2, "save_steps": 1, "max_samples": 8,
        "per_device_train_batch_size": 1, "report_to": "none", "use_cpu": True, "overwrite_cache": True,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(given))
    path = os.pathsep.join([str(scripts_on_path), os.environ.get("PATH", "")])
    caches = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PATH": path}
    done = subprocess.run(
        ["llamafactory-cli", "train", str(folder / "run.yaml")],
        env={**os.environ, **caches, "LLAMAFACTORY_PREFLIGHT": "warn"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    yield folder, given


def test_checkpoints_are_as_large_as_predicted(saved: tuple[Path, dict[str, Any]], tiny_model: Path) -> None:
    folder, given = saved
    software = Software.installed()
    run = from_arguments(given, software=software, origin="run.yaml")
    shape = ModelShape.from_config(json.loads((tiny_model / "config.json").read_text()))
    told = checkpoint_size.of_shape(run, shape, software=software)
    assert told is not None
    (_, first), (_, second) = sorted((file.name, file) for file in (folder / "out").glob("checkpoint-*"))
    for checkpoint in (first, second):
        assert told.model == pytest.approx((checkpoint / "model.safetensors").stat().st_size, rel=0.01)
        assert told.states == pytest.approx((checkpoint / "optimizer.pt").stat().st_size, rel=0.01)
    (need,) = disk.checkpoints(run, told)
    really = sum(file.stat().st_size for file in (folder / "out").rglob("*") if file.suffix in (".safetensors", ".pt"))
    assert need.size == pytest.approx(really, rel=0.02)
