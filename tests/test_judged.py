"""Every argument that LLaMA-Factory accepts is read by a formula, known to be harmless, or makes a run `unknown`."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from llamafactory_preflight import preflight
from llamafactory_preflight.arguments import judged, schema
from llamafactory_preflight.run import RunDescription


ARGUMENTS = {
    "dataset": "identity",
    "do_train": True,
    "bf16": True,
    "cutoff_len": 512,
    "per_device_train_batch_size": 1,
}
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16, "dtype": "bfloat16",
}  # fmt: skip
READ = {field.name for field in fields(RunDescription)} - {"unmodelled"}


def test_every_argument_of_the_installed_llamafactory_is_judged() -> None:
    known = schema.load()
    assert known is not None
    places = (READ, judged.WITHOUT_EFFECT, set(judged.WITHOUT_FORMULA))
    counts = {name: sum(name in place for place in places) for name in known.arguments}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_every_field_of_a_run_is_read_by_something(root: Path) -> None:
    package = root / "plugin/llamafactory_preflight"
    read: set[str] = set()
    for file in package.rglob("*.py"):
        if file.name in ("run.py", "judged.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    assert READ - read == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_aux_loss_coef", 0.001),
        ("add_tokens", "<a>,<b>"),
        ("optim_args", "foreach=False"),
        ("use_liger_kernel", True),
    ],
)
def test_what_no_formula_knows_makes_a_run_unknown(tiny_model: Path, key: str, value: object) -> None:
    given = ARGUMENTS | {"model_name_or_path": str(tiny_model)}
    certain = preflight.check(given, free="20GiB")
    assert certain.verdict.word == "fits"
    result = preflight.check(given | {key: value}, free="20GiB")
    assert result.run.unmodelled == (key,)
    assert result.verdict.word == "unknown"
    assert f"`{key}`" in result.verdict.reasons[0]


def test_an_argument_that_nobody_judged_is_not_taken_for_harmless() -> None:
    assert list(judged.unmodelled({"lora_rank": 8, "learning_rate": 1e-4, "of_next_year": 1}, read=READ)) == [
        "of_next_year"
    ]


@pytest.mark.parametrize(("key", "values"), judged.WITHOUT_FORMULA.items())
def test_a_value_that_changes_nothing_is_no_reason(key: str, values: tuple[object, ...]) -> None:
    assert all(not list(judged.unmodelled({key: value}, read=READ)) for value in values)


def test_code_that_comes_with_a_checkpoint_is_not_guessed_at(tmp_path: Path, tiny_model: Path) -> None:
    config = (tiny_model / "config.json").read_text(encoding="utf-8")
    own = '{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"},' + config.lstrip().removeprefix("{")
    (tmp_path / "config.json").write_text(own, encoding="utf-8")
    given = ARGUMENTS | {"model_name_or_path": str(tmp_path)}
    assert preflight.check(given, free="20GiB").verdict.word == "fits"
    result = preflight.check(given | {"trust_remote_code": True}, free="20GiB")
    assert result.verdict.word == "unknown"
    assert "trust_remote_code" in result.verdict.reasons[0]
