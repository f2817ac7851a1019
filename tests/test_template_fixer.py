"""The fixer inside LLaMA-Factory: stages, switches, other models, broken data, and random conversations."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from template_factory import (
    NO_THINK_PROMPT,
    OPENAI,
    PLAIN,
    RANKING,
    REASONED,
    THINK_PROMPT,
    WITH,
    WITHOUT,
    Factory,
    factory,
    pair,
)
from template_matrix import END_OF_TEXT, IM_END, VARIANTS, Situation, Variant, answer, expected, result, sharegpt, user


__all__ = ["factory"]
pytestmark = pytest.mark.usefixtures("no_datasets_cache")


@pytest.mark.parametrize(
    ("chosen", "rejected", "texts"),
    [
        (WITH, WITHOUT, (THINK_PROMPT + WITH, THINK_PROMPT + "<think>\n\n</think>\n\nb")),
        (WITHOUT, WITH, (NO_THINK_PROMPT + "b", NO_THINK_PROMPT + "a")),
        (WITH, WITH, (THINK_PROMPT + WITH, THINK_PROMPT + WITH)),
    ],
)
def test_a_pair_has_the_mode_of_its_chosen_answer(
    factory: Factory, chosen: str, rejected: str, texts: tuple[str, str]
) -> None:
    (row,) = factory.rows([pair(chosen, rejected)], stage="rm", columns=RANKING)
    for name, text in zip(("chosen", "rejected"), texts, strict=True):
        assert factory.text(row[f"{name}_input_ids"]) == text + "<|im_end|>"
        prompt = THINK_PROMPT if chosen == WITH else NO_THINK_PROMPT
        assert factory.text(row[f"{name}_labels"]) == text.removeprefix(prompt) + "<|im_end|>"


@pytest.mark.parametrize(("value", "prompt"), [(WITH, THINK_PROMPT), (WITHOUT, NO_THINK_PROMPT)])
def test_kto(factory: Factory, value: str, prompt: str) -> None:
    records = [{**sharegpt([user("q"), answer("x", written=value)]), "tag": tag} for tag in (True, False)]
    for row in factory.rows(records, stage="kto", columns={"kto_tag": "tag"}):
        assert factory.text(row["input_ids"]) == factory.text(row["kl_input_ids"]) == prompt + value + "<|im_end|>"
        assert factory.text(row["labels"]) == value + "<|im_end|>"


@pytest.mark.parametrize("stage", ["sft", "ppo"])
@pytest.mark.parametrize(("asked", "prompt"), [(None, THINK_PROMPT), (True, THINK_PROMPT), (False, NO_THINK_PROMPT)])
def test_a_prediction_does_not_look_at_the_label(
    factory: Factory, stage: str, asked: bool | None, prompt: str
) -> None:
    records = [sharegpt([user("q"), given]) for given in (PLAIN, REASONED)]
    rows = factory.rows(records, stage=stage, generate=True, enable_thinking=asked)
    assert [factory.text(row["input_ids"]) for row in rows] == [prompt, prompt]


def test_pretraining_ends_a_document_with_end_of_text(factory: Factory) -> None:
    records = [sharegpt([user("some text"), answer("")])]
    rows = factory.rows(records, stage="pt")
    assert [row["input_ids"][-1] for row in rows] == [END_OF_TEXT]
    assert factory.tokenizer.eos_token_id == IM_END


def test_a_document_without_text_is_left_out(factory: Factory) -> None:
    records = [sharegpt([user("some text"), answer("")]), {"conversations": None}]
    length = len(factory.tokenizer.encode("some text<|endoftext|>"))
    for packing in (False, True):
        rows = factory.rows(records, stage="pt", packing=packing, cutoff_len=length + packing)
        assert [factory.text(row["input_ids"]) for row in rows] == ["some text<|endoftext|>"]
    assert "1 of 2 documents in a row have no text and are left out" in factory.said


def test_packing(factory: Factory) -> None:
    records = [sharegpt([user("q"), PLAIN])] * 3
    (row,) = factory.rows(records, packing=True, neat_packing=True, cutoff_len=100)
    assert factory.text(row["labels"]).count("a<|im_end|>") == 3
    assert row["labels"].count(IM_END) == 3


@pytest.mark.parametrize(
    ("turns", "trained"),
    [("split", [["a1"], ["a2"], ["a3"]]), ("last", [["a3"]]), ("concat", [["a1", "a2", "a3"]])],
)
def test_turns(
    factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    turns: str,
    trained: list[list[str]],
) -> None:
    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE_TURNS", turns)
    messages = [message for n in "123" for message in (user(f"q{n}"), answer(f"a{n}"))]
    rows = factory.rows([sharegpt(messages)])
    assert [factory.text(row["labels"]).split("<|im_end|>")[:-1] for row in rows] == trained
    lengths = [len(row["input_ids"]) for row in rows]
    cost = f"1 conversations became 3 samples and {sum(lengths)} tokens instead of about {lengths[-1]}"
    assert (cost in factory.said) == (turns == "split")


def test_mask_history_trains_the_last_answer(factory: Factory) -> None:
    rows = factory.rows([sharegpt([user("q1"), answer("a1"), user("q2"), answer("a2")])], mask_history=True)
    assert [factory.text(row["labels"]) for row in rows] == ["a2<|im_end|>"]


def test_a_chain_with_reasoning_is_one_sample(factory: Factory) -> None:
    """The active chain keeps its reasoning, so one text serves all answers, as far as every one has reasoning."""
    chain = [user("q"), answer("", "r1", calls=("add",)), result("1"), answer("a", "r2")]
    assert [row["labels"].count(IM_END) for row in factory.rows([sharegpt(chain)])] == [2]
    chain += [user("q2"), answer("b", "r3")]
    assert [row["labels"].count(IM_END) for row in factory.rows([sharegpt(chain)])] == [2, 1]


def test_no_loss_on_reasoning(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE_LOSS", "answer")
    (row,) = factory.rows([sharegpt([user("q"), REASONED])])
    assert factory.text(row["input_ids"]) == THINK_PROMPT + WITH + "<|im_end|>"
    assert factory.text(row["labels"]) == "a<|im_end|>"


def test_the_old_empty_block(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE_EMPTY_THINK", "train")
    (row,) = factory.rows([sharegpt([user("q"), PLAIN])])
    assert factory.text(row["labels"]) == "<think>\n\n</think>\n\na<|im_end|>"
    (row,) = factory.rows([sharegpt([user("q"), PLAIN])], enable_thinking=False)
    assert factory.text(row["labels"]) == "a<|im_end|>"


def test_enable_thinking_none_as_a_text(factory: Factory) -> None:
    (row,) = factory.rows([sharegpt([user("q"), PLAIN])], enable_thinking="None")
    assert factory.text(row["input_ids"]) == NO_THINK_PROMPT + "a<|im_end|>"


def test_an_unknown_enable_thinking_is_refused(factory: Factory) -> None:
    with pytest.raises(ValueError, match="enable_thinking: maybe is not a value"):
        factory.template(enable_thinking="maybe")


def test_template_null(factory: Factory, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.data.template import TEMPLATES

    for name in ("qwen3", "qwen3_5_think", "qwen3_thinking_2507"):
        if name == "qwen3_5_think" and "qwen3_5" not in TEMPLATES:  # then there is nothing to put in its place
            continue
        monkeypatch.setattr(factory.tokenizer, "chat_template", chat_templates[name])
        template = factory.template(None)
        ids, _ = template.encode_oneturn(
            factory.tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
        )
        monkeypatch.setattr(factory.tokenizer, "chat_template", chat_templates[name])
        wanted = factory.tokenizer.apply_chat_template(
            [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True
        )
        assert factory.text(ids) == wanted


@pytest.mark.parametrize("name", ["qwen3_nothink", "qwen3_5", "qwen3_vl", "qwen3_6"])
def test_the_family_s_own_names_are_switched(factory: Factory, name: str) -> None:
    from llamafactory.data.template import TEMPLATES

    if name not in TEMPLATES:
        pytest.skip(f"this LLaMA-Factory has no template {name}")
    (row,) = factory.rows([sharegpt([user("q"), PLAIN])], name=name)
    assert factory.text(row["input_ids"]) == NO_THINK_PROMPT + "a<|im_end|>"
    assert f"Qwen3 is not trained with `template: {name}`; `qwen3` is used" in factory.said


@pytest.mark.parametrize("name", ["qwen", "default", "llama3", "chatml"])
def test_a_foreign_name_is_named_and_left(factory: Factory, name: str) -> None:
    from llamafactory.data.template import TEMPLATES

    if name not in TEMPLATES:
        pytest.skip(f"this LLaMA-Factory has no template {name}")
    own = copy.deepcopy(factory.tokenizer)
    factory.tokenizer = own
    assert factory.template(name) is TEMPLATES[name]
    assert "Use `template: qwen3`" in factory.said


def test_a_changed_chat_template_is_not_trusted(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.data.template import TEMPLATES

    monkeypatch.setattr(factory.tokenizer, "chat_template", factory.tokenizer.chat_template + "x")
    assert factory.template() is TEMPLATES["qwen3"]
    assert "not an official one that is known" in factory.said


def test_warn_says_and_changes_nothing(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.data.template import TEMPLATES

    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE", "warn")
    before = factory.tokenizer.chat_template
    assert factory.template() is TEMPLATES["qwen3"]
    said = factory.said
    assert (
        "an answer without reasoning: LLaMA-Factory's loss does not lie on the answer" in said
        and "repaired" not in said
    )
    assert factory.tokenizer.chat_template == before


def test_repairs_are_said_once_one_line_each(factory: Factory) -> None:
    from llamafactory_preflight.templates.audit import REPAIRS

    factory.template()
    factory.template()
    head, *lines = factory.said.splitlines()
    assert head.startswith("repaired for Qwen3, where LLaMA-Factory's `qwen3` failed ")
    topics = [line.strip().partition(":")[0] for line in lines]
    assert topics == [topic for topic in REPAIRS if topic in topics] and len(topics) > 4


def test_every_difference_belongs_to_a_repair() -> None:
    from llamafactory_preflight.templates.audit import REPAIRS
    from llamafactory_preflight.templates.probe import PROBES

    assert {probe.topic for probe in PROBES} | {"stop tokens"} == REPAIRS.keys()


@pytest.mark.parametrize(("streams", "times"), [("2>&1", 1), ("2>&1 | cat", 1), ("2>error.txt", 2), (">/dev/null", 1)])
def test_one_terminal_shows_a_line_once(tmp_path: Path, run: Any, streams: str, times: int) -> None:
    code = "from llamafactory_preflight.fixer import session; session.say('hello')"
    done = run(["bash", "-c", f'{sys.executable} -c "{code}" {streams}'], cwd=tmp_path)
    file = tmp_path / "error.txt"
    seen = done.stdout + done.stderr + (file.read_text() if file.exists() else "")
    assert done.returncode == 0 and seen.count("hello") == times


def test_off_says_nothing(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.data.template import TEMPLATES

    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE", "off")
    assert factory.template() is TEMPLATES["qwen3"]
    assert factory.said == ""


def test_a_fault_of_ours_leaves_llamafactory_s_template(
    factory: Factory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory.data.template import TEMPLATES

    monkeypatch.delenv("LLAMAFACTORY_PREFLIGHT_WARNED", raising=False)
    for broken in ("templates.families.recognise", "fixer.compare.audit"):  # before and after LLaMA-Factory's own call
        with monkeypatch.context() as patch:
            patch.setattr(f"llamafactory_preflight.{broken}", lambda *_: 1 / 0)
            patch.delenv("LLAMAFACTORY_PREFLIGHT_WARNED", raising=False)
            assert factory.template() is TEMPLATES["qwen3"], broken
            assert "is left out (ZeroDivisionError" in capsys.readouterr().err


def test_llamafactory_s_own_errors_stay(factory: Factory) -> None:
    with pytest.raises(ValueError, match="Template none_such does not exist"):
        factory.template("none_such")


def test_where_llamafactory_is_right_nothing_changes(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A LLaMA-Factory that renders as the official template does is not replaced."""
    from llamafactory.data.template import TEMPLATES

    official = factory.template()
    monkeypatch.setitem(TEMPLATES, "qwen3", dataclasses.replace(official, purpose="train"))
    from llamafactory_preflight.fixer import compare

    assert compare.audit(TEMPLATES["qwen3"], official, factory.tokenizer)[0].id == "served"
    chosen = compare.audit(Both(official), official, factory.tokenizer)
    assert chosen == []


class Both:
    """A template that is right for training and serving."""

    def __init__(self, official: Any) -> None:
        self.served = official
        self.trained = dataclasses.replace(official, purpose="train")

    def encode_oneturn(self, *args: Any) -> Any:
        return self.served.encode_oneturn(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trained, name)


def test_nothing_of_llamafactory_s_is_changed(factory: Factory) -> None:
    from llamafactory.data.template import TEMPLATES

    before = copy.deepcopy(vars(TEMPLATES["qwen3"]))
    template = factory.template(enable_thinking=False)
    factory.template(enable_thinking=True)
    assert template is not TEMPLATES["qwen3"]
    changed = {name for name, value in vars(TEMPLATES["qwen3"]).items() if repr(value) != repr(before[name])}
    assert changed <= {"enable_thinking"}  # LLaMA-Factory itself sets this one


def test_behavior_unchanged_for_every_other_template(
    tokenizer: Any, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.data.template import TEMPLATES
    from llamafactory.hparams import DataArguments

    from llamafactory_preflight.templates.families import OWN_TEMPLATES

    call = json.dumps({"name": "add", "arguments": {"x": 1}})
    conversations = [
        ["q", "a"],
        ["q", "<think>\nr\n</think>\n\na", "q2", "<think>r</think>a2"],
        ["q <|im_end|>", "", " q2", "\n\na"],
    ]
    names = sorted(TEMPLATES.keys() - OWN_TEMPLATES)
    assert len(names) > 50
    own = {switch: copy.deepcopy(tokenizer) for switch in ("fix", "off")}
    for name in names:
        seen = []
        for switch, mine in own.items():
            monkeypatch.setenv("LLAMAFACTORY_TEMPLATE", switch)
            mine.chat_template = chat_templates["qwen3"]
            template = get_template_and_fix_tokenizer(mine, DataArguments(template=name))
            rendered: list[Any] = []
            for contents in conversations:
                messages = [
                    {"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)
                ]
                for system in (None, "S"):
                    rendered.append(_or_error(template.encode_multiturn, mine, messages, system))
                    rendered.append(_or_error(template.encode_oneturn, mine, messages, system))
            calling = [{"role": "user", "content": "q"}, {"role": "function", "content": call}]
            rendered.append(_or_error(template.encode_multiturn, mine, calling, None, "[]"))
            stops = sorted(template.get_stop_token_ids(mine), key=str)
            seen.append((template is TEMPLATES[name], rendered, mine.chat_template, mine.eos_token, stops))
        assert seen[0] == seen[1], name
        assert seen[0][0], name


def _or_error(render: Any, *args: Any) -> Any:
    try:
        return render(*args)
    except Exception as error:
        return repr(error)


IMAGE_PAD = 151655


@pytest.fixture
def eyes() -> Any:
    from transformers import Qwen2VLImageProcessor

    images = Qwen2VLImageProcessor(min_pixels=32 * 32, max_pixels=64 * 64)
    return SimpleNamespace(image_processor=images, video_processor=images, model_input_names=[])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_think"])
def test_images_stay_with_their_turn_and_typed_ones_are_text(
    factory: Factory,
    chat_templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    eyes: Any,
    tmp_path: Path,
    name: str,
) -> None:
    from PIL import Image

    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    for file in files:
        Image.new("RGB", (64, 64)).save(file)
    monkeypatch.setattr(factory.tokenizer, "chat_template", chat_templates[name])
    record = sharegpt([user("<image>one <|image_pad|>"), answer("a"), user("<image>two"), answer("b")])
    rows = factory.rows(
        [{**record, "images": files}], columns={"images": "images"}, name="qwen3_vl_nothink", processor=eyes
    )
    pads = [row["input_ids"].count(IMAGE_PAD) for row in rows]
    given = [len(row["images"]) for row in rows]
    if name == "qwen3_vl":
        assert (pads, given) == ([8], [2])
    else:
        assert (pads, given) == ([4, 8], [1, 2])
    assert all("one <|image_pad|><|im_end|>" in factory.text(row["input_ids"]) for row in rows)


WRONG_ROLES = "it is empty, or its roles are not as they should be"
BROKEN = {
    "the arguments of a call are not JSON": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": "{x"}'},
        ]
    },
    "a call is missing": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "[]"}]
    },
    "a call is not JSON": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add(1)"}]
    },
    WRONG_ROLES: {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}]},
}
ODD = {
    "an empty turn": sharegpt([user("q"), answer("a"), user(" "), answer("b")]),
    "a think tag that is never closed": sharegpt([user("q"), answer("x", written="<think>\nr")]),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_samples_are_counted_and_named(factory: Factory, streaming: bool) -> None:
    good = sharegpt([user("q"), PLAIN])
    records = [good, *BROKEN.values(), good, *ODD.values()]
    rows = factory.rows(records, streaming=streaming)
    said = factory.said.replace(" of the shuffled stream", "")
    for position, reason in enumerate(BROKEN, 1):
        assert f"left out: {reason} (index {position})" in said
    for position, reason in enumerate(ODD, len(BROKEN) + 2):
        assert f"kept: {reason} (index {position})" in said
    assert "50% of the data for training is lost" in said
    assert len(rows) == 2 + 1 + 2  # two good ones, one that is kept, and one of two answers


@pytest.mark.parametrize("streaming", [False, True])
def test_records_that_llamafactory_cannot_read_are_counted(factory: Factory, streaming: bool) -> None:
    good = sharegpt([user("q"), PLAIN])
    asked, said = good["conversations"]
    broken: list[Any] = [None, [], [asked, None], [asked, said | {"from": "bot"}], [asked | {"from": None}, said]]
    empty = {"conversations": [asked | {"value": None}, said]}
    records = [good, *({"conversations": messages} for messages in broken), empty]
    assert len(factory.rows(records, streaming=streaming)) == 2
    said = factory.said.replace("the first ", "").replace(" of the shuffled stream", "")
    assert f"5 of 7 samples for training left out: {WRONG_ROLES} (index 1, 2, 3, 4, 5)" in said
    assert "kept: an empty turn (index 6)" in said


def test_openai_records_that_llamafactory_cannot_read_are_counted(factory: Factory) -> None:
    asked, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    calling = [said | {"tool_calls": calls} for calls in ([None], [{"function": {"name": None, "arguments": "{}"}}])]
    records: list[Any] = [[asked, said], None, [{"role": "developer", "content": "S"}, asked, said]]
    records += [[asked, answer] for answer in calling]
    rows = factory.rows([{"messages": messages} for messages in records], columns=OPENAI, formatting="openai")
    assert [factory.text(row["input_ids"]) for row in rows] == [NO_THINK_PROMPT + "a<|im_end|>"]
    assert f"left out: {WRONG_ROLES} (index 1, 2)" in factory.said
    assert "left out: a call has no name (index 3, 4)" in factory.said


@pytest.mark.parametrize("streaming", [False, True])
def test_preference_data_that_llamafactory_cannot_read_is_counted(factory: Factory, streaming: bool) -> None:
    good = pair("a", "b")
    asked, wrong = good["conversations"], {"from": "human", "value": "c"}
    broken = [{"chosen": None}, {"conversations": None}, {"chosen": wrong}, {"rejected": wrong | {"from": "bot"}}]
    later = {"conversations": [*asked, {"from": "gpt", "value": WITH}, *asked]}
    rows = factory.rows(
        [good, *(good | change for change in broken), good | later], stage="rm", columns=RANKING, streaming=streaming
    )
    assert f"left out: {WRONG_ROLES} (index 1, 2, 3, 4" in factory.said
    history = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    prompts = [NO_THINK_PROMPT, history + NO_THINK_PROMPT]
    for name, text in (("chosen", "a"), ("rejected", "b")):
        assert [factory.text(row[f"{name}_input_ids"]) for row in rows] == [
            f"{prompt}{text}<|im_end|>" for prompt in prompts
        ]


@pytest.mark.parametrize("streaming", [False, True])
def test_feedback_without_a_tag_is_counted(factory: Factory, streaming: bool) -> None:
    good = sharegpt([user("q"), REASONED, user("q"), PLAIN])
    tags = [True, None, False]
    rows = factory.rows(
        [good | {"tag": tag} for tag in tags], stage="kto", columns={"kto_tag": "tag"}, streaming=streaming
    )
    assert [row["kto_tags"] for row in rows] == [True, False]
    assert "left out: it has no second answer, or no tag (index 1" in factory.said


def test_a_broken_sample_is_named_by_its_place_before_the_split(factory: Factory) -> None:
    """LLaMA-Factory shuffles what it splits; several processes count as one does."""
    good, broken = sharegpt([user("q"), PLAIN]), sharegpt([answer("a"), user("q")])
    records = [good] * 9 + [broken] + [good] * 9 + [broken] + [good] * 20
    rows = factory.rows(records, dataset="x", val_size=0.1, preprocessing_num_workers=2)
    assert len(rows) == 34 and f"2 of 36 samples for training left out: {WRONG_ROLES} (index 9, 19)" in factory.said


@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_one_good_sample_is_told(
    factory: Factory, streaming: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAFACTORY_PREFLIGHT_WARNED", raising=False)
    assert factory.rows([{"conversations": None}, BROKEN[WRONG_ROLES]], streaming=streaming) == []
    assert "100% of the data for training is lost" in factory.said
    assert "is left out (" not in capsys.readouterr().err  # a fault of ours


def test_objects_are_not_filled_with_the_keys_of_others(factory: Factory) -> None:
    """Tools and arguments may be objects: `datasets` then gives every one the keys of all, with nulls."""
    asked = {"role": "user", "content": "q"}
    records = []
    for name, arguments in (("x", {"x": {"deep": 1}}), ("y", {"y": [{"z": 2}], "x": None})):
        tool = {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "integer"}}}}
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        answered = {"role": "assistant", "content": "", "tool_calls": calls}
        records.append({"messages": [asked, answered], "tools": [{"type": "function", "function": tool}]})
    texts = [factory.text(row["input_ids"]) for row in factory.rows(records, columns=OPENAI, formatting="openai")]
    assert '"arguments": {"x": {"deep": 1}}}' in texts[0] and '"arguments": {"y": [{"z": 2}]}}' in texts[1]
    assert '"properties": {"x": {"type": "integer"}}' in texts[0]
    assert '"properties": {"y": {"type": "integer"}}' in texts[1]
    assert not any("null" in text for text in texts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [None, "packing", "neat_packing"])
def test_an_answer_longer_than_the_limit_is_left_out(
    factory: Factory, monkeypatch: pytest.MonkeyPatch, packing: str | None, streaming: bool
) -> None:
    from datasets.arrow_writer import OptimizedTypedSequence

    monkeypatch.setattr(OptimizedTypedSequence, "__init__", OptimizedTypedSequence.__init__)  # neat packing changes it
    long, short = sharegpt([user("q"), answer("word " * 50)]), sharegpt([user("q"), PLAIN])
    options = {"packing": packing is not None, "neat_packing": packing == "neat_packing"}
    rows = factory.rows([long, short, long], cutoff_len=40, streaming=streaming, **options)
    assert [factory.text(row["labels"]) for row in rows] == ["a<|im_end|>"]
    assert not any(name.startswith("_") for name in rows[0])
    seen = "the first 3 samples" if streaming else "3 samples"
    assert f"2 of {seen} left out: even without the user's text they are longer than cutoff_len" in factory.said
    assert "67% of the data for training is lost" in factory.said


@pytest.mark.parametrize("stage", ["sft", "rm", "kto"])
@pytest.mark.parametrize("text", ["", "<think>r</think>\n", "<think>\n\n</think>\n\n"])
def test_an_empty_answer_is_named(factory: Factory, stage: str, text: str) -> None:
    empty, good = sharegpt([user("q"), answer(text)]), sharegpt([user("q"), PLAIN])
    columns: dict[str, Any] = {}
    if stage == "rm":
        empty, good, columns = pair("a", text), pair("a", "b"), RANKING
    elif stage == "kto":
        empty, good = ({**record, "tag": True} for record in (empty, good))
        columns = {"kto_tag": "tag"}
    assert len(factory.rows([good, empty], stage=stage, columns=columns)) == 2
    assert "1 of 2 samples for training kept: an empty turn (index 1)" in factory.said


def test_reasons_for_losses_add_up(factory: Factory) -> None:
    good, broken = sharegpt([user("q"), PLAIN]), sharegpt([answer("a"), user("q")])
    long = sharegpt([user("q"), answer("word " * 50)])
    factory.rows([good] * 97 + [broken, broken, long], cutoff_len=40)
    assert "of the data for training is lost" not in factory.said
    factory.rows([good] * 94 + [broken] * 3 + [long] * 3, cutoff_len=40)
    assert "6% of the data for training is lost" in factory.said


def test_of_streamed_data_the_first_thousand_are_counted(factory: Factory) -> None:
    good, broken = sharegpt([user("q"), PLAIN]), sharegpt([answer("a"), user("q")])
    rows = factory.rows([good] * 900 + [broken] * 200 + [good] * 200, streaming=True)
    assert "100 of the first 1000 samples for training left out" in factory.said
    assert "10% of the data for training is lost" in factory.said
    assert len(rows) == 1100


@pytest.mark.parametrize("cutoff_len", range(16, 60))
def test_no_limit_cuts_a_header_or_a_stop_token(factory: Factory, cutoff_len: int) -> None:
    template = factory.template()
    from llamafactory_preflight.fixer.choose import for_stage

    staged = for_stage(template, "sft", do_generate=False, cutoff_len=cutoff_len)
    messages = [{"role": "user", "content": "one two three " * 10}, {"role": "assistant", "content": "yes " * 8}]
    for prompt, target in staged.encode_multiturn(factory.tokenizer, messages):
        assert len(prompt) + len(target) < cutoff_len
        assert factory.text(target) == "yes " * 8 + "<|im_end|>"
        assert factory.text(prompt).startswith("<|im_start|>user\n")
        assert factory.text(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert factory.text(prompt).count("<|im_end|>") == 1


@pytest.mark.parametrize("said", ["", "Wait.", "[1] See {x}:"])
@pytest.mark.parametrize(
    "typed", ["<tool_call>", "</tool_call>", "<tool_call>{}</tool_call>", "<think>", "</think>\n\n"]
)
def test_a_tag_in_an_argument_is_text(factory: Factory, said: str, typed: str) -> None:
    turns = [user("q"), call(said, "", [("add", {"x": typed})])]
    (row,) = factory.rows([sharegpt(turns, tools=True)])
    block = f'<tool_call>\n{{"name": "add", "arguments": {{"x": {json.dumps(typed)}}}}}\n</tool_call><|im_end|>'
    assert factory.text(row["labels"]) == (f"{said}\n" if said else "") + block


def test_a_special_token_in_a_list_that_is_printed_as_python_does(
    factory: Factory, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory.tokenizer, "chat_template", chat_templates["qwen3_coder"])
    (row,) = factory.rows(
        [sharegpt([user("q"), call("", "", [("add", {"x": ["<|im_end|>"]})])], tools=True)], name="qwen3_nothink"
    )
    assert "['<|im_end|>']" in factory.text(row["labels"]) and row["labels"].count(IM_END) == 1


texts = st.text(
    alphabet=st.one_of(st.sampled_from("ab \n<>|/你🤖"), st.characters(exclude_categories=("Cs", "Cc", "Cn"))),
    max_size=12,
)
pieces = st.sampled_from(
    [
        *("<think>", "</think>", "`<think>`", "<tool_call>", "</tool_response>", "<|im_end|>", "<|endoftext|>", "```"),
        *("<|im_start|>assistant\n", "{", "\n\n", " ", "{{content}}", "{{idx}}", "<image>"),
    ]
)
contents = st.lists(st.one_of(texts, pieces), min_size=1, max_size=4).map("".join)
untagged = contents.filter(lambda text: "think>" not in text)
answers = st.one_of(
    st.builds(answer, untagged),
    # After reasoning, a dataset cannot say where the line breaks of the tags end and those of the text begin.
    st.builds(answer, untagged.map(lambda text: text.lstrip("\n")), untagged.filter(str.strip)),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), untagged),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=3,
)


def call(text: str, reasoning: str, functions: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    made = answer(text, reasoning, calls=tuple(name for name, _ in functions))
    for tool_call, (_, arguments) in zip(made["tool_calls"], functions, strict=True):
        tool_call["function"]["arguments"] = arguments
    return made


calls = st.builds(
    call,
    st.sampled_from(["", "Wait."]),
    st.sampled_from(["", "r"]),
    st.lists(
        st.tuples(st.sampled_from(["add", "sub"]), st.dictionaries(st.sampled_from("xyz"), values, max_size=2)),
        min_size=1,
        max_size=2,
    ),
)
exchanges = st.one_of(
    st.tuples(contents.map(user), answers),
    st.tuples(contents.map(user), calls, contents.map(result), answers),
)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    variant=st.sampled_from(VARIANTS),
    exchanges=st.lists(exchanges, min_size=1, max_size=3),
    system=st.sampled_from([None, "S", " S\n"]),
)
def test_random_conversations(
    tokenizer: Any,
    chat_templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    variant: Variant,
    exchanges: list[tuple[dict[str, Any], ...]],
    system: str | None,
) -> None:
    """Whatever is said, every answer is trained once, after the official prompt, and the text is the official one."""
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.template import TEMPLATES

    from llamafactory_preflight.fixer.choose import for_stage
    from llamafactory_preflight.fixer.convert import _merged
    from llamafactory_preflight.fixer.prepare import Preparation

    assume(variant.template in TEMPLATES)
    monkeypatch.setattr(tokenizer, "chat_template", chat_templates[variant.chat_template])
    messages = [message for exchange in exchanges for message in exchange]
    tools = any("tool_calls" in message for message in messages)
    case = Situation(
        id="random",
        record={},
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=tools,
    )
    wanted = list(expected(variant, case, tokenizer, chat_templates[variant.chat_template]))
    names = {"human": "user", "gpt": "assistant", "function_call": "function", "observation": "observation"}
    record = sharegpt(messages, tools)
    merged = _merged(record["conversations"], DatasetAttr("file", "x", formatting="sharegpt"))
    turns = [{"role": names[turn["from"]], "content": turn["value"]} for turn in merged]
    template = for_stage(
        Factory(tokenizer).template(variant.template, enable_thinking=variant.enable_thinking),
        "sft",
        do_generate=False,
        cutoff_len=10**6,
    )
    batch = {"_prompt": [turns[:-1]], "_response": [turns[-1:]], "_tools": [record.get("tools", "")]}
    batch |= {name: [None] for name in ("_images", "_videos", "_audios")}
    prepared = Preparation(template=template, splits=True)(batch, [0])
    found = []
    for prompt, response in zip(prepared["_prompt"], prepared["_response"], strict=True):
        before: list[int] = []
        for source, target in template.encode_multiturn(tokenizer, [*prompt, *response], system, record.get("tools")):
            before += source
            found.append((tokenizer.decode(before), tokenizer.decode(target)))
            before += target
            assert target[-1] == IM_END and target.count(IM_END) == 1
    # The tokenizer composes characters, so ids cannot tell more than this.
    assert found == [tuple(unicodedata.normalize("NFC", text) for text in (want.prompt, want.text)) for want in wanted]
