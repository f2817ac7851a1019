"""FSDP: settings as accelerate and transformers read them, and what a rank then takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_preflight import cli, memory, preflight
from llamafactory_preflight.device import planned
from llamafactory_preflight.errors import Unmodelled, UserError
from llamafactory_preflight.memory import Card, MemoryEstimate, Ranks
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.parallel.fsdp import FsdpPlan
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import measure_ranks  # noqa: E402


GIB = 2**30
RECORDED = json.loads((ROOT / "tests" / "recorded_fsdp.json").read_text())
SOFTWARE = Software(torch="2.9.1", transformers="5.6.0", accelerate="1.11.0", liger_kernel="0.8.5")
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
NUMEL = 4022468096
SETTINGS: list[dict[str, Any]] = [
    {},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_cpu_ram_efficient_loading": False},
    {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE"},
    {"fsdp_sharding_strategy": 2, "fsdp_use_orig_params": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    {"fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer", "fsdp_activation_checkpointing": True},
]


def config(**section: Any) -> dict[str, Any]:
    """A configuration of accelerate."""
    named = {f"fsdp_{name}": value for name, value in section.items()}
    section = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | named
    return {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": section}


def run_under(accelerate: dict[str, Any] | None, **settings: Any) -> RunDescription:
    env = None if accelerate is None else fsdp.from_accelerate(accelerate, origin="fsdp.yaml")
    return RunDescription(
        **{"model_name_or_path": "m", "bf16": True, "optim": "adamw_torch_fused", "per_device_train_batch_size": 1}
        | {"gradient_accumulation_steps": 2, **settings},
        accelerate=env,
    )


def predict(accelerate: dict[str, Any] | None, *, world: int = 2, **settings: Any) -> MemoryEstimate:
    shape = ModelShape.from_config(QWEN3_4B)
    ranks = Ranks(world=world, local=world)
    return memory.estimate(run_under(accelerate, **settings), shape, software=SOFTWARE, ranks=ranks)


# settings


@pytest.mark.parametrize("section", SETTINGS, ids=str)
def test_a_configuration_sets_what_accelerate_launch_sets(tmp_path: Path, section: dict[str, Any]) -> None:
    asked = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
    given = asked | {"fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | section}
    theirs = measure_ranks.launched(given, tmp_path)
    ours = fsdp.from_accelerate(given, origin="fsdp.yaml")
    assert ours == {name: value for name, value in theirs.items() if "DYNAMO" not in name}


@pytest.mark.parametrize("section", SETTINGS, ids=str)
def test_a_plan_is_what_accelerate_makes_of_the_environment(
    section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    env = fsdp.from_accelerate(config() | {"fsdp_config": config()["fsdp_config"] | section}, origin="fsdp.yaml")
    assert env is not None
    # Without a card the plugin cannot be told to synchronize, nor to load once.
    apart = {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    for name, value in (env | apart).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    plan = fsdp.plan(None, None, env)
    assert plan is not None
    assert plan.version == plugin.fsdp_version
    reshards = plugin.reshard_after_forward if plan.version == 2 else plugin.sharding_strategy.name == "FULL_SHARD"
    assert plan.reshards is bool(reshards)
    offloads = "CPUOffloadPolicy" in repr(plugin.cpu_offload) or getattr(plugin.cpu_offload, "offload_params", False)
    assert plan.offloads is bool(offloads)
    if plan.version == 1:
        assert plan.prefetches is (getattr(plugin.backward_prefetch, "name", "") == "BACKWARD_PRE")
    assert ("fsdp_activation_checkpointing" in plan.unmodelled) is plugin.activation_checkpointing


@pytest.mark.parametrize(
    ("options", "section"),
    [("full_shard auto_wrap", {}), ("shard_grad_op auto_wrap", {}), ("full_shard auto_wrap offload", {"version": 2}),
     ("shard_grad_op auto_wrap", {"version": 2}), ("full_shard auto_wrap", {"backward_prefetch": "backward_pre"})],
)  # fmt: skip
def test_arguments_ask_for_what_the_trainer_gives_accelerate(
    tmp_path: Path, options: str, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    args = TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, fsdp=options, fsdp_config=dict(section)
    )
    given = args.fsdp_plugin_args | {"sync_module_states": False}  # needs a card
    plugin = FullyShardedDataParallelPlugin(**given)
    plan = fsdp.plan(options, section, None)
    assert plan is not None and not plan.launched
    strategy = getattr(plugin.sharding_strategy or plugin.reshard_after_forward, "name", None)
    reshards = plugin.reshard_after_forward if plan.version == 2 else strategy == "FULL_SHARD"
    assert (plan.version, plan.reshards) == (plugin.fsdp_version, bool(reshards))
    assert plan.offloads is ("offload" in options)
    if plan.version == 1:
        assert plan.prefetches is (getattr(plugin.backward_prefetch, "name", "") == "BACKWARD_PRE")


def test_without_the_switch_there_is_no_plan() -> None:
    assert fsdp.launched_with({"FSDP_VERSION": "2"}) is None
    assert fsdp.plan(None, {"version": 2}, None) is None
    assert fsdp.from_accelerate({"distributed_type": "MULTI_GPU"}, origin="a.yaml") is None


@pytest.mark.parametrize(
    ("faulty", "words"),
    [({"fsdp_config": {}}, "no `distributed_type`"), (config() | {"fsdp_config": [1]}, "not a mapping"),
     (config(version=3), "not 1 or 2"), (config(sharding_strategy="HALF"), "not one of FULL_SHARD"),
     (config(auto_wrap_policy="SOME"), "not one of TRANSFORMER")],
)  # fmt: skip
def test_a_faulty_configuration_is_told_in_one_message(faulty: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        fsdp.plan(None, None, fsdp.from_accelerate(faulty, origin="fsdp.yaml"))


# what a rank takes


def recorded_run(run: dict[str, Any]) -> RunDescription:
    section: dict[str, Any] = {"version": run["version"]}
    if run["version"] == 1:
        section |= {"sharding_strategy": run["strategy"]}
        section |= {"backward_prefetch": "BACKWARD_PRE" if run["prefetch"] else "NO_PREFETCH"}
    else:
        section |= {"reshard_after_forward": run["strategy"] == "FULL_SHARD"}
    kind = "lora" if run["lora"] else "full"
    return run_under(config(**section), finetuning_type=kind, cutoff_len=8)


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_a_rank_allocates_what_torch_does(name: str) -> None:
    recorded = RECORDED["runs"][name]
    shape = ModelShape.from_config(RECORDED["model"] | {"torch_dtype": "bfloat16"})
    ranks = Ranks(world=RECORDED["world"], local=RECORDED["world"])
    estimate = memory.estimate(recorded_run(recorded), shape, software=SOFTWARE, card=Card(), ranks=ranks)
    saving_one_unit = RECORDED["model"]["vocab_size"] * RECORDED["model"]["hidden_size"]
    saving_one_unit += RECORDED["model"]["hidden_size"]
    wide = recorded["version"] == 2 or not recorded["lora"]
    resting = estimate.phases["save"] - saving_one_unit * (4 if wide else 2)
    assert estimate.phases["forward_backward"] - resting == pytest.approx(recorded["heights"]["micro_step"], rel=0.007)
    assert estimate.phases["optimizer_step"] - resting == pytest.approx(recorded["heights"]["step"], rel=0.001)


@pytest.mark.parametrize("version", [1, 2])
def test_what_ranks_share_shrinks_with_their_number(version: int) -> None:
    two, eight = (predict(config(version=version), world=world, finetuning_type="full") for world in (2, 8))
    assert eight.components["optimizer"] == pytest.approx(two.components["optimizer"] / 4, rel=0.01)
    assert eight.peak_allocated_bytes < two.peak_allocated_bytes


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_stay_whole_until_the_last_micro_step(version: int) -> None:
    settings = {"finetuning_type": "full", "cutoff_len": 16}
    one, four = (
        predict(config(version=version), world=8, gradient_accumulation_steps=steps, **settings) for steps in (1, 4)
    )
    more = four.phases["forward_backward"] - one.phases["forward_backward"]
    assert more > NUMEL  # 2 bytes of everything instead of 4 of an eighth, while a layer's are on their way


def test_version_2_keeps_frozen_weights_in_float32() -> None:
    one, two = (predict(config(version=version)) for version in (1, 2))
    assert two.phases["save"] - one.phases["save"] >= NUMEL  # 2 bytes more of each half


@pytest.mark.parametrize("version", [1, 2])
def test_offloading_moves_states_to_main_memory(version: int) -> None:
    kept, moved = (
        predict(config(version=version, offload_params=offload), finetuning_type="full") for offload in (False, True)
    )
    assert moved.components["optimizer"] == 0
    assert moved.phases["forward_backward"] < kept.phases["forward_backward"] - 5 * NUMEL
    assert moved.host_training_bytes > kept.host_training_bytes + 7 * NUMEL


def test_adapters_stay_gathered_where_their_layer_does() -> None:
    shared = config(version=1, sharding_strategy="SHARD_GRAD_OP")
    small, large = (predict(shared, lora_rank=rank, cutoff_len=16).components for rank in (8, 64))
    # Whole in 16 bit they take as much as the float32 half that this rank keeps.
    assert large["weights"] - small["weights"] == pytest.approx(large["adapters"] - small["adapters"], rel=0.05)


def test_without_loading_once_every_card_takes_the_whole_model_first() -> None:
    once, each = (predict(config(version=1, cpu_ram_efficient_loading=once)) for once in (True, False))
    assert each.phases["load"] > 2 * NUMEL > once.phases["load"]


# what has no formula


@pytest.mark.parametrize(
    ("accelerate", "settings", "words"),
    [
        (config(sharding_strategy="HYBRID_SHARD"), {}, "HYBRID_SHARD"),
        (config(auto_wrap_policy="SIZE_BASED_WRAP"), {}, "SIZE_BASED_WRAP"),
        (config(activation_checkpointing=True), {}, "activation_checkpointing"),
        (config() | {"mixed_precision": "no"}, {"bf16": False}, "mixed precision"),
        (config(), {"stage": "dpo"}, "Stage `dpo`"),
        (config(), {"finetuning_type": "freeze"}, "full tuning and plain LoRA"),
        (config(), {"finetuning_type": "full", "optim": "adamw_8bit"}, "adamw_8bit"),
        (config(version=2), {"quantization_bit": 4}, "version 1 and 4 bit"),
        (config(version=2), {"use_unsloth_gc": True}, "reentrant"),
        (None, {"fsdp": "full_shard"}, "without auto_wrap"),
        (None, {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}, "reentrant"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_runs_are_unknown_and_say_why(
    accelerate: dict[str, Any] | None, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unmodelled, match=words):
        predict(accelerate, **settings)


def test_one_process_shares_nothing() -> None:
    with pytest.raises(Unmodelled, match="this run has one"):
        predict(config(), world=1)


# the way in


def given(folder: Path) -> dict[str, Any]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_4B | {"architectures": ["Qwen3ForCausalLM"]}))
    return {
        "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "dataset": "identity", "template": "qwen3", "bf16": True, "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 1,
    }  # fmt: skip


def test_the_environment_of_accelerate_launch_is_read(tmp_path: Path) -> None:
    env = fsdp.from_accelerate(config(version=2), origin="fsdp.yaml")
    assert env is not None
    card = planned(gpu="24GiB")
    assert card is not None
    devices, arguments = (card, card), given(tmp_path)
    settings = {"origin": "a", "beside": None, "devices": devices, "host_budget_bytes": 64 * GIB}
    result = preflight.examine(arguments, **settings, environ=env | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    plan = result.run.fsdp_plan
    assert isinstance(plan, FsdpPlan) and plan.version == 2
    assert result.estimate is not None
    without = preflight.examine(arguments, **settings, environ={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert without.estimate is not None
    assert result.estimate.peak_allocated_bytes != without.estimate.peak_allocated_bytes


def test_the_command_takes_the_file_of_accelerate_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given(tmp_path)))
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(config(version=1)))
    command = ["preflight", str(tmp_path / "a.yaml"), "--gpu", "24GiB", "--gpus", "2", "--json", "--host-ram", "64GiB"]
    outputs = []
    for more in ([], ["--accelerate-config", str(tmp_path / "fsdp.yaml")]):
        assert cli.main([*command, *more]) in (0, 1)
        outputs.append(json.loads(capsys.readouterr().out))
    peaks = [output["gpu"]["peak_allocated_bytes"] for output in outputs]
    assert 0 < peaks[1] < peaks[0]
    assert cli.main([*command, "--accelerate-config", str(tmp_path / "a.yaml")]) == 2
    assert "no configuration of accelerate" in capsys.readouterr().err
