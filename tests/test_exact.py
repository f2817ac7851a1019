"""`--exact`: the simulation behind the command line, for architectures that the formula does not know."""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_preflight import preflight, simulate
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.shape import FAMILIES
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate import replay
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB


COMMON = {"dtype": "bfloat16", "tie_word_embeddings": False, "num_attention_heads": 32}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "phi3": COMMON
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "vocab_size": 32064}
    | {"pad_token_id": 32000},
    "olmo2": COMMON | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 100352},
    "glm4": COMMON
    | {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "vocab_size": 151552}
    | {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "pad_token_id": 151329},
}
PARAMETERS = {"phi3": 3_821_079_552, "olmo2": 7_298_617_344, "glm4": 9_400_279_040}  # as the model cards count them
RUN = {"stage": "sft", "do_train": True, "dataset": "rows", "template": "default", "bf16": True, "output_dir": "out"}

Run = Callable[..., Any]


def file_of(folder: Path, model_type: str, **changes: Any) -> Path:
    model = folder / model_type
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS.get(model_type, {}) | {"model_type": model_type}))
    file = folder / "a.yaml"
    file.write_text(yaml.safe_dump(RUN | {"model_name_or_path": str(model), "cutoff_len": 512} | changes))
    return file


@pytest.mark.parametrize("model_type", CONFIGS)
def test_architectures_without_a_formula(model_type: str) -> None:
    assert model_type not in FAMILIES
    run = RunDescription(bf16=True, lora_rank=8, per_device_train_batch_size=1, cutoff_len=512)
    found = simulate.estimate(run, CONFIGS[model_type] | {"model_type": model_type}, software=Software.installed())
    assert found.components["weights"] == pytest.approx(2 * PARAMETERS[model_type], rel=1e-4)
    assert sum(found.components.values()) == found.peak_allocated_bytes == found.phases["forward_backward"]
    assert found.low_bytes < found.peak_allocated_bytes < found.high_bytes
    assert found.slack_bytes > 0


def test_the_command_line(run: Run, tmp_path: Path) -> None:
    file = file_of(tmp_path, "olmo2", enable_liger_kernel=True, quantization_bit=4)
    command = ["llamafactory-cli", "preflight", file.name, "--gpu", "24GiB", "--json"]
    plain, exact = (run([*command, *more], cwd=tmp_path) for more in ([], ["--exact"]))
    assert plain.returncode == 2
    assert "--exact" in json.loads(plain.stdout)["reasons"][0]
    assert (exact.returncode, exact.stderr) == (0, "")
    answer = json.loads(exact.stdout)
    assert answer["verdict"] == "fits"
    assert 4 * GIB < answer["gpu"]["peak_allocated_bytes"] < 8 * GIB
    assert answer["host"]["peak_bytes"] > GIB
    assert answer["reasons"][1].startswith("Simulated with 2 and 3 of 32 layers")


def check(file: Path) -> Result:
    return preflight.check(file, gpu="80GiB", exact=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stage": "ppo", "reward_model": "x"}, "does not follow the loop of stage `ppo`"),
        ({"use_unsloth": True}, "does not follow `use_unsloth`"),
        ({"quantization_bit": 8, "quantization_method": "hqq"}, "does not follow the kernels of `hqq`"),
        ({"finetuning_type": "full", "quantization_bit": 4}, "fails with"),
    ],
)
def test_what_is_not_simulated_is_unknown(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    result = check(file_of(tmp_path, "olmo2", **changes))
    assert (result.verdict.word, result.estimate) == ("unknown", None)
    assert reason in result.verdict.reasons[0]


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    (reason,) = check(file_of(tmp_path, "home_made")).verdict.reasons
    assert reason.startswith("transformers ")
    assert reason.endswith("has no model type `home_made`.")


def test_weights_that_come_quantized_are_refused() -> None:
    config = CONFIGS["olmo2"] | {"model_type": "olmo2", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(Unmodelled, match="come quantized"):
        simulate.estimate(RunDescription(bf16=True), config, software=Software.installed())


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_unsloth_gc": True, "cutoff_len": 4096}, {"finetuning_type": "full", "optim": "paged_adamw_8bit"}],
)
def test_main_memory_and_slack_are_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 32000}
    config = COMMON | shape | {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 64}
    file = file_of(tmp_path, "llama", **changes)
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    exact, formula = (preflight.check(file, gpu="80GiB", exact=exact).estimate for exact in (True, False))
    assert exact is not None
    assert formula is not None
    assert exact.host_bytes == pytest.approx(formula.host_bytes, rel=1e-3)
    assert exact.peak_allocated_bytes == pytest.approx(formula.peak_allocated_bytes, rel=2e-3)
    assert exact.slack_bytes == pytest.approx(formula.slack_bytes, rel=2e-3)
    assert exact.tokens_per_step == formula.tokens_per_step


SLOWEST = "qwen3_5"  # its layers run a loop over the chunks of a sequence where no kernel is installed for it
MOST_SECONDS = 20  # of one core


def test_the_slowest_family_takes_no_longer_than_it_may(run: Run, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    file = file_of(tmp_path, SLOWEST, cutoff_len=2048)
    config = CONFIG_MAPPING[SLOWEST]().to_dict() | {"dtype": "bfloat16"}
    (tmp_path / SLOWEST / "config.json").write_text(json.dumps(config))
    command = ["llamafactory-cli", "preflight", file.name, "--gpu", "80GiB", "--json", "--exact"]
    for _ in range(2):  # once more where a busy machine has slowed the computing itself
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(command, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert json.loads(done.stdout)["reasons"][1].startswith("Simulated with 4 and 8 of 32 layers")
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if seconds < MOST_SECONDS:
            return
    pytest.fail(f"{seconds:.0f} seconds of computing")


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "val_size": 0.1, "eval_strategy": "steps"},
        {"disable_gradient_checkpointing": True, "finetuning_type": "full", "pure_bf16": True, "bf16": False},
    ],
)
def test_a_loop_that_is_replayed_takes_what_it_takes(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[f"{SLOWEST}_text"](num_hidden_layers=4, hidden_size=512, vocab_size=32000).to_dict()
    run = dataclasses.replace(RunDescription(bf16=True, lora_rank=8, cutoff_len=200), **changes)
    config |= {"dtype": "bfloat16"}
    found = []
    for loops in (replay.LOOPS, ()):
        monkeypatch.setattr(replay, "LOOPS", loops)
        found.append(simulate.estimate(run, config, software=Software.installed()))
    assert found[0] == found[1]
    assert found[0].phases["forward_backward"] > found[0].phases["load"]
