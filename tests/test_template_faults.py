"""Faults that must be gone in every stage, not in supervised training alone; and what a run says about its data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from template_factory import NO_THINK_PROMPT, OPENAI, PLAIN, RANKING, REASONED, THINK_PROMPT, Factory, factory, pair
from template_matrix import IM_END, SITUATIONS, VARIANTS, Situation, Variant, answer, expected, openai, sharegpt, user


__all__ = ["factory"]
pytestmark = pytest.mark.usefixtures("no_datasets_cache")

HYBRID, QWEN3_6 = (next(variant for variant in VARIANTS if variant.id == name) for name in ("hybrid thinking", "3.6"))
SIZES = SimpleNamespace(merge_size=2, temporal_patch_size=2)
EYES = SimpleNamespace(image_processor=SIZES, video_processor=SIZES)  # enough where there is nothing to look at
WHOLE = [case for case in SITUATIONS if case.formatting == "sharegpt" and case.id != "truncated"]


def with_template(
    factory: Factory, variant: Variant, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str:
    from llamafactory.data.template import TEMPLATES

    if variant.template not in TEMPLATES:
        pytest.skip(f"this LLaMA-Factory has no template {variant.template}")
    official = chat_templates[variant.chat_template]
    monkeypatch.setattr(factory.tokenizer, "chat_template", official)
    return official


def preference(case: Situation) -> dict[str, Any]:
    """The conversation with another answer to choose from; a result of several tools stays one message."""
    turns = case.record["conversations"]
    return case.record | {"conversations": turns[:-1], "chosen": turns[-1], "rejected": {"from": "gpt", "value": "no"}}


@pytest.mark.parametrize("stage", ["rm", "kto", "ppo"])
@pytest.mark.parametrize("variant", [HYBRID, QWEN3_6], ids=lambda variant: variant.id)
def test_every_stage_renders_a_conversation_as_supervised_training_does(
    factory: Factory, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch, variant: Variant, stage: str
) -> None:
    official = with_template(factory, variant, chat_templates, monkeypatch)
    cases = [case for case in WHOLE if case.id != "parallel calls" or stage != "rm"]
    columns: dict[str, Any] = {"rm": RANKING, "kto": {"kto_tag": "tag"}, "ppo": {}}[stage]
    records = [(preference(case) if stage == "rm" else case.record | {"tag": False}) for case in cases]
    rows = factory.rows(
        [{"tools": "", **record} for record in records],
        stage=stage,
        columns=columns,
        name=variant.template,
        processor=EYES,
    )
    prefix = "chosen_" if stage == "rm" else ""
    for case, row in zip(cases, rows, strict=True):
        want = list(expected(variant, case, factory.tokenizer, official))[-1]
        text = factory.text(row[f"{prefix}input_ids"])
        if stage == "ppo":  # no answer is looked at, so the mode is the template's own
            thinking = [*want.before, answer("x", "r")]
            asked = Situation(id="", record={}, messages=thinking, tools=case.tools)
            assert text == list(expected(variant, asked, factory.tokenizer, official))[-1].prompt, case.id
            continue
        assert text == want.prompt + want.text, case.id
        assert factory.text(row[f"{prefix}labels"]) == want.text, case.id
        assert row[f"{prefix}labels"].count(IM_END) == 1, case.id


@pytest.mark.parametrize(
    ("chat_template", "given", "prompt", "answered"),
    [
        ("qwen3", "qwen3_nothink", THINK_PROMPT, NO_THINK_PROMPT),
        ("qwen3_5_think", "qwen3_5_nothink", THINK_PROMPT + "<think>\n", NO_THINK_PROMPT),
        ("qwen3_6", "qwen3_5_nothink", THINK_PROMPT + "<think>\n", NO_THINK_PROMPT),
        ("qwen3_instruct_2507", "qwen3", THINK_PROMPT, THINK_PROMPT),
        ("qwen3_thinking_2507", "qwen3_nothink", THINK_PROMPT + "<think>\n", THINK_PROMPT + "<think>\n\n</think>\n\n"),
        ("qwen3_vl", "qwen3_vl", THINK_PROMPT, THINK_PROMPT),
    ],
)
def test_another_variant_of_the_family_gets_its_own_prompt(
    factory: Factory,
    chat_templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    chat_template: str,
    given: str,
    prompt: str,
    answered: str,
) -> None:
    from llamafactory.data.template import TEMPLATES

    from llamafactory_preflight.templates import families

    family = families.recognise(chat_templates[chat_template])
    assert family is not None
    if not {given, family.template} <= TEMPLATES.keys():
        pytest.skip("this LLaMA-Factory does not know both names")
    monkeypatch.setattr(factory.tokenizer, "chat_template", chat_templates[chat_template])
    (row,) = factory.rows([sharegpt([user("q"), PLAIN])], name=given, processor=EYES)
    assert factory.text(row["input_ids"]) == answered + "a<|im_end|>"
    assert f"`template: {given}`; `{family.template}` is used" in factory.said
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    template = factory.template(given, enable_thinking=True)  # said by the page or nobody: it is the default
    expects_thinking = "think" in family.modes and not given.endswith("_nothink")
    only = len(family.modes) == 1
    served = prompt if only or expects_thinking else NO_THINK_PROMPT
    assert factory.text(template.encode_oneturn(factory.tokenizer, asked)[0]) == served


@pytest.mark.parametrize("system", ["S", None])
@pytest.mark.parametrize("tools", [False, True])
def test_no_text_is_put_into_the_system_of_openai_data(
    factory: Factory, chat_templates: dict[str, str], system: str | None, tools: bool
) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [user("q"), REASONED]
    case = Situation(id="", record=openai(messages, tools), messages=messages, tools=tools)
    (want,) = expected(HYBRID, case, factory.tokenizer, chat_templates["qwen3"])
    (row,) = factory.rows([case.record], columns=OPENAI, formatting="openai")
    assert factory.text(row["input_ids"]) == want.prompt + want.text


def test_thinking_that_was_asked_for_and_is_not_there_is_told(
    factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory_preflight.fixer import session

    explicit = session.Session(explicit=frozenset({"enable_thinking"}))
    monkeypatch.setattr(session, "CURRENT", explicit)
    rows = factory.rows([sharegpt([user("q"), given]) for given in (PLAIN, PLAIN, REASONED)], enable_thinking=True)
    assert [factory.text(row["input_ids"]) for row in rows[1:]] == [
        NO_THINK_PROMPT + "a<|im_end|>",
        THINK_PROMPT + "<think>\nr\n</think>\n\na<|im_end|>",
    ]
    assert "enable_thinking: true is set, and 2 answers have no reasoning" in factory.said


@pytest.mark.parametrize(
    ("num_reasoned", "words"), [(1, "without thinking"), (2, "with thinking"), (3, "with thinking")]
)
def test_the_majority_of_mixed_data_is_told_and_saved(
    factory: Factory, chat_templates: dict[str, str], num_reasoned: int, words: str
) -> None:
    """A draw leaves the template's own default."""
    from llamafactory_preflight.templates import families

    given = [REASONED] * num_reasoned + [PLAIN] * (4 - num_reasoned)
    factory.rows([sharegpt([user("q"), message]) for message in given])
    count = f"{num_reasoned} answers are trained with thinking and {4 - num_reasoned} without"
    assert f"{count}. The saved chat template answers {words}" in factory.said
    mode = families.default_mode(factory.tokenizer.chat_template)
    assert mode == ("think" if words == "with thinking" else "no_think")


def test_the_board_s_log_has_every_repair(factory: Factory, tmp_path: Path) -> None:
    """LLaMA-Board shows `running_log.txt`, which LLaMA-Factory's logger writes."""
    import logging as standard

    from llamafactory.extras import logging

    handler = logging.LoggerHandler(str(tmp_path))
    root = standard.getLogger("llamafactory")
    logging.get_logger("llamafactory.data.template")
    root.addHandler(handler)
    try:
        factory.rows([sharegpt([user("q"), PLAIN])])
        handler.close()
    finally:
        root.removeHandler(handler)
    log = (tmp_path / "running_log.txt").read_text(encoding="utf-8")
    said = factory.said.splitlines()
    assert len(said) > 5 and all(line in log for line in said)


@pytest.mark.parametrize("stage", ["sft", "rm", "kto"])
def test_a_very_long_sample_is_cut_inside_the_question(factory: Factory, stage: str) -> None:
    long = "word " * 100_000
    record: dict[str, Any] = sharegpt([user(long), answer("a", "r")]) | {"tag": True}
    columns: dict[str, Any] = {"kto_tag": "tag"} if stage == "kto" else {}
    if stage == "rm":
        chosen, rejected = record["conversations"][1], {"from": "gpt", "value": "b"}
        record, columns = record | {"conversations": record["conversations"][:1]}, RANKING
        record |= {"chosen": chosen, "rejected": rejected}
    (row,) = factory.rows([record], stage=stage, columns=columns, cutoff_len=64)
    text = factory.text(row["chosen_input_ids" if stage == "rm" else "input_ids"])
    assert text.startswith("<|im_start|>user\n") and text.count("<|im_end|>") == 2
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\na<|im_end|>")


def test_tools_may_be_one_object_or_a_list(factory: Factory) -> None:
    tool = {"name": "add", "parameters": {}}
    records = [
        sharegpt([user("q"), PLAIN]) | {"tools": text} for text in (json.dumps(tool), json.dumps([tool]), "", None)
    ]
    one, listed, *none = [factory.text(row["input_ids"]) for row in factory.rows(records)]
    assert one == listed and '{"type": "function", "function": {"name": "add", "parameters": {}}}' in one
    assert none == [NO_THINK_PROMPT + "a<|im_end|>"] * 2


def test_no_loss_on_reasoning_leaves_each_answer_its_own(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE_LOSS", "answer")
    good, bad = ("<think>\n{}\n</think>\n\n{}".format(*words) for words in (("good", "a"), ("bad", "b")))
    (row,) = factory.rows([pair(good, bad)], stage="rm", columns=RANKING)
    for name, written in (("chosen", good), ("rejected", bad)):
        assert factory.text(row[f"{name}_input_ids"]) == f"{THINK_PROMPT}{written}<|im_end|>"
        assert factory.text(row[f"{name}_labels"]) == f"{written[-1]}<|im_end|>"


@pytest.mark.parametrize("text", ["q", "q<|im_end|>"])
def test_split_special_tokens_splits_no_token_of_the_template(
    factory: Factory, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (usual,) = factory.rows([sharegpt([user(text), PLAIN])])
    monkeypatch.setattr(factory.tokenizer, "split_special_tokens", True)
    (row,) = factory.rows([sharegpt([user(text), PLAIN])])
    assert row["input_ids"] == usual["input_ids"] and row["input_ids"].count(IM_END) == 2


@pytest.mark.parametrize("is_bypassed", [False, True])
def test_a_tokenized_dataset_has_its_record_before_the_weights_are_loaded(
    factory: Factory, tmp_path: Path, is_bypassed: bool
) -> None:
    from llamafactory_preflight.fixer import points, session
    from llamafactory_preflight.templates import record

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    factory.rows([sharegpt([user("q"), PLAIN])])
    session.CURRENT.tokenized_path = str(tmp_path)
    if is_bypassed:  # the record is then the one of the model
        session.CURRENT.is_bypassed = True
        factory.template()
    with pytest.raises(MemoryError):
        points.model(fails, (), {})
    assert (record.read(tmp_path) is None) == is_bypassed
