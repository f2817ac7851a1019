from __future__ import annotations

from pathlib import Path

import pytest

from llamafactory_preflight.arguments import schema


def problems(given: dict[str, object], *, allow_extra: bool = False) -> list[str]:
    known = schema.load()
    assert known is not None
    return [str(problem) for _, problem in known.problems(given, allow_extra=allow_extra)]


def test_a_near_key_is_suggested() -> None:
    assert problems({"lora_rnk": 8}) == [
        "`lora_rnk` is not an argument of LLaMA-Factory. Write `lora_rank` if you meant that."
    ]


def test_a_far_key_is_legal_only_with_extra_arguments() -> None:
    assert "ALLOW_EXTRA_ARGS=1" in problems({"zzzzzzzz": 1})[0]
    assert problems({"zzzzzzzz": 1}, allow_extra=True) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora_rank", "8", "`lora_rank` is '8', not a whole number."),
        ("lora_rank", 8.5, "`lora_rank` is 8.5, not a whole number."),
        ("lora_rank", True, "`lora_rank` is True, not a whole number."),
        ("lora_rank", None, "`lora_rank` is empty."),
        ("learning_rate", "abc", "`learning_rate` is 'abc', not a number."),
        ("bf16", "true", "`bf16` is 'true', not true or false."),
        ("bf16", 1, "`bf16` is 1, not true or false."),
        ("stage", "sftt", "`stage` is 'sftt', which is none of pt, sft, rm, ppo, dpo, kto."),
        ("dataset", {"a": 1}, "`dataset` is {'a': 1}, not text."),
        ("eval_strategy", False, "quote it"),
    ],
)
def test_wrong_types(key: str, value: object, message: str) -> None:
    (problem,) = problems({key: value})
    assert message in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_rank", 8),
        ("lora_rank", 8.0),
        ("learning_rate", 1),
        ("save_steps", 0.5),
        ("dataset", "a,b"),
        ("dataset", ["a", "b"]),
        ("dataset", None),
        ("deepspeed", {"zero_optimization": {"stage": 2}}),
        ("flash_attn", "fa2"),
        ("optim", "adamw_8bit"),
        ("eval_strategy", "no"),
        ("quantization_bit", 4),
        ("report_to", "none"),
        ("report_to", ["wandb"]),
        ("mixture_of_depths", None),
    ],
)
def test_right_types(key: str, value: object) -> None:
    assert problems({key: value}) == []


def test_a_package_that_looks_different_gives_no_schema(tmp_path: Path) -> None:
    assert schema.parse(tmp_path, tmp_path) is None
    (tmp_path / "training_args.py").write_text("x = (")
    (tmp_path / "training_args_seq2seq.py").write_text("")
    assert schema.parse(tmp_path, tmp_path) is None
