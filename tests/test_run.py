from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


SOFTWARE = Software(torch="2.9.1", llamafactory="0.9.5", transformers="5.6.0")


def described(software: Software = SOFTWARE, **arguments: Any) -> RunDescription:
    return from_arguments({"model_name_or_path": "a/b", **arguments}, software=software, origin="a.yaml")


def test_lists_are_split_as_llamafactory_splits_them() -> None:
    run = described(lora_target="q_proj, v_proj", dataset=["a", "b"], additional_target=None)
    assert run.lora_target == ("q_proj", "v_proj")
    assert run.dataset == ("a", "b")
    assert run.additional_target == ()


def test_numbers_have_their_field_s_type() -> None:
    run = described(save_steps=500, lora_rank=8.0, val_size=0)
    assert (run.save_steps, run.lora_rank, run.val_size) == (500.0, 8, 0.0)
    assert isinstance(run.save_steps, float) and isinstance(run.lora_rank, int)


@pytest.mark.parametrize(
    ("torch", "optim"),
    [
        ("2.9.1+cu128", "adamw_torch_fused"),
        ("2.8.0", "adamw_torch_fused"),
        ("2.7.1", "adamw_torch"),
        (None, "adamw_torch"),
    ],
)
def test_the_default_optimizer_depends_on_torch(torch: str | None, optim: str) -> None:
    assert described(Software(torch=torch)).optim == optim
    assert described(Software(torch=torch), optim="sgd").optim == "sgd"


@pytest.mark.parametrize(
    ("arguments", "packing"),
    [
        ({}, False),
        ({"stage": "pt"}, True),
        ({"stage": "pt", "packing": False}, False),
        ({"packing": True}, True),
        ({"packing": True, "stage": "dpo"}, False),
        ({"neat_packing": True}, True),
        ({"neat_packing": True, "packing": False}, True),
    ],
)
def test_packing_is_implied(arguments: dict[str, Any], packing: bool) -> None:
    assert described(**arguments).packing is packing


def test_an_evaluation_strategy_implies_evaluation() -> None:
    assert described(eval_strategy="steps").do_eval
    assert not described(eval_strategy="no").do_eval


def test_deepspeed_is_loaded_whatever_way_it_is_given(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert described(deepspeed=str(file)).deepspeed == config
    assert described(deepspeed=config).deepspeed == config
    assert described(deepspeed=json.dumps(config)).deepspeed == config


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("{", "is not readable JSON"), ("[1]", "holds no JSON object")],
)
def test_a_faulty_deepspeed_file(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        described(deepspeed=str(file))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lora_rank", 0, "`lora_rank` is 0.*Give 1 or more"),
        ("cutoff_len", -1, "Give 1 or more"),
        ("per_device_train_batch_size", 0, "Give 1 or more"),
        ("lora_rank", 1e99, "more than anything can hold"),
        ("freeze_trainable_layers", -(10**30), "more than anything can hold"),
        ("lora_rank", float("inf"), "not a whole number"),
    ],
)
def test_counts_that_no_run_can_have(name: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        described(**{name: value})


def test_counts_below_zero_that_mean_something() -> None:
    assert described(max_steps=-1, freeze_trainable_layers=-2).freeze_trainable_layers == -2


def test_all_faults_come_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        from_arguments(
            {"lora_rnk": 1, "lora_rank": "8", "deepspeed": str(tmp_path / "no.json")},
            software=SOFTWARE,
            origin="a.yaml",
        )
    message = str(caught.value)
    assert message.startswith("4 arguments in a.yaml need attention:")
    for part in ("`lora_rnk`", "`lora_rank` is '8'", "no.json does not exist", "`model_name_or_path` is missing"):
        assert part in message


def test_a_single_fault_names_the_file() -> None:
    with pytest.raises(UserError, match=r"^`bf16` is 'yes', not true or false \(a\.yaml\)\.$"):
        described(bf16="yes")


def test_extra_keys_are_legal_when_allowed() -> None:
    given = {"model_name_or_path": "a/b", "something_of_mine": 1}
    assert from_arguments(given, software=SOFTWARE, origin="a.yaml", allow_extra=True).model_name_or_path == "a/b"
    with pytest.raises(UserError, match="something_of_mine"):
        from_arguments(given, software=SOFTWARE, origin="a.yaml")


@pytest.mark.parametrize(
    ("key", "message"),
    [("distributed_type", "accelerate"), ("model", "USE_V1=1"), ("tensor_model_parallel_size", "USE_MCA=1")],
)
def test_a_file_of_another_kind_is_recognised(key: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        from_arguments({key: "x", "and_more": 1}, software=SOFTWARE, origin="a.yaml")
    assert str(raised.value).count("\n") == 0
