"""Every variant in every situation, through LLaMA-Factory's own converters and processors, with and without the fixer.

Six questions per cell:
(a) the prompt is the official one of the trained mode;
(b) prompt and answer are the official text, and their ids those of the two texts;
(c) loss from the first to the last token of the answer, with one stop token;
(d) the chat page's prompt is the trained one;
(e) the saved chat template answers in the trained mode;
(f) the stop tokens are the official ones.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from template_matrix import END_OF_TEXT, IM_END, SITUATIONS, VARIANTS, Expected, Situation, Variant, expected, render


CELLS = [(variant, case) for variant in VARIANTS for case in SITUATIONS]
QUESTIONS = "abcdef"
LINE_BREAK = 198
REPORT = Path(__file__).resolve().parents[1] / "saves" / "template_matrix.md"


pytestmark = pytest.mark.usefixtures("no_datasets_cache")


def trained(
    variant: Variant, case: Situation, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, switch: str
) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    """LLaMA-Factory's template, the aligned rows, and what it makes of the record."""
    import datasets
    from llamafactory.data import get_template_and_fix_tokenizer, loader
    from llamafactory.data.converter import align_dataset
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.hparams import DataArguments

    monkeypatch.setenv("LLAMAFACTORY_TEMPLATE", switch)
    attr = DatasetAttr("file", "x", formatting=case.formatting)
    if case.formatting == "openai":
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        tags |= {"observation_tag": "tool", "function_tag": "function", "system_tag": "system", "messages": "messages"}
        vars(attr).update(tags)
    attr.tools = "tools" if case.tools else None
    arguments = DataArguments(
        template=variant.template, enable_thinking=variant.enable_thinking, cutoff_len=case.cutoff_len
    )
    training = SimpleNamespace(local_process_index=0, should_log=False, predict_with_generate=False)
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    aligned = align_dataset(datasets.Dataset.from_list([case.record]), attr, arguments, training)
    rows = aligned.to_list()
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    eyes = SimpleNamespace(image_processor=sizes, video_processor=sizes)  # enough where there is nothing to look at
    made = loader._get_preprocessed_dataset(aligned, arguments, training, "sft", template, tokenizer, eyes)
    return template, rows, made.to_list()


def spans(labels: list[int]) -> list[tuple[int, int]]:
    """Half-open ranges of tokens with loss; LLaMA-Factory's line break after a stop token does no harm."""
    has_loss = [False, *(label != -100 for label in labels), False]
    edges = [at for at, (before, after) in enumerate(pairwise(has_loss)) if before != after]
    return [
        (start, end - 1 if labels[end - 2 : end] == [IM_END, LINE_BREAK] else end)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def cut_as_trained(want: Expected, prompt: str, case: Situation) -> str:
    """The official prompt of the same conversation with as much of the question as was left."""
    question = case.messages[0]["content"]
    head, _, tail = want.prompt.partition(question)
    left = prompt.removeprefix(head).removesuffix(tail)
    return head + left + tail if left and question.endswith(left) else want.prompt


def answers(
    variant: Variant, case: Situation, tokenizer: Any, official: str, monkeypatch: pytest.MonkeyPatch, switch: str
) -> dict[str, bool]:
    """The six questions of one cell."""
    monkeypatch.setattr(tokenizer, "chat_template", official)
    wanted = list(expected(variant, case, tokenizer, official))
    try:
        template, rows, made = trained(variant, case, tokenizer, monkeypatch, switch)
    except Exception:  # without the fixer, LLaMA-Factory crashes on some
        if switch == "fix":
            raise
        return dict.fromkeys(QUESTIONS, False)
    found = [(row["input_ids"], row["labels"], span) for row in made for span in spans(row["labels"])]
    said = {question: bool(found) and len(found) == len(wanted) for question in "abc"}
    for (ids, labels, (start, end)), want in zip(found, wanted, strict=False):
        prompt = tokenizer.decode(ids[:start])
        wanted_prompt = want.prompt
        if case.id == "truncated":
            wanted_prompt = cut_as_trained(want, prompt, case)
            said["a"] &= len(ids) <= case.cutoff_len
        said["a"] &= prompt == wanted_prompt
        said["b"] &= prompt + tokenizer.decode(ids[start:end]) == wanted_prompt + want.text
        if case.has_special_text:
            # Official ids would have these as control tokens: one turn of the user, and one prompt, open two.
            said["a"] &= Counter(ids[:start])[IM_END] == 1
        else:
            halves = [tokenizer.encode(text, add_special_tokens=False) for text in (wanted_prompt, want.text)]
            said["b"] &= ids[:start] + ids[start:end] == halves[0] + halves[1]
        said["c"] &= labels[start:end] == ids[start:end] and labels[end - 1] == IM_END
        said["c"] &= Counter(labels[start:end])[IM_END] == 1 and tokenizer.decode(labels[start:end]) == want.text
    said["d"] = served_as_trained(variant, case, template, tokenizer, rows, wanted)
    counts = Counter(want.mode for want in wanted)
    mode = counts.most_common(1)[0][0]
    question = [{"role": "user", "content": "x"}]
    prompts = [
        render(tokenizer, text, question, False, add_generation_prompt=True, **options)
        for text, options in ((tokenizer.chat_template, {}), (official, {"enable_thinking": mode == "think"}))
    ]
    said["e"] = prompts[0] == prompts[1]
    said["f"] = {IM_END, END_OF_TEXT} <= set(template.get_stop_token_ids(tokenizer))
    said["f"] &= tokenizer.eos_token_id == IM_END and tokenizer.pad_token_id == END_OF_TEXT
    return said


def served_as_trained(
    variant: Variant,
    case: Situation,
    template: Any,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    wanted: list[Expected],
) -> bool:
    """Whether the chat page asks for each answer with the prompt that was trained.

    A model that was trained without thinking has said nothing with reasoning before.
    """
    row = rows[0]
    messages = [*row["_prompt"], *row["_response"]]
    if variant.enable_thinking is False:
        messages = [
            message | {"content": re.sub(r"(?s)^.*</think>\n*", "", message["content"])} for message in messages
        ]
    ends = [end for end, message in enumerate(messages) if message["role"] in ("assistant", "function")]
    if len(ends) != len(wanted):
        return False
    same = True
    for end, want in zip(ends, wanted, strict=True):
        if len(variant.modes) > 1:
            template.enable_thinking = want.mode == "think"  # as the page's box does
        conversation = [*messages[:end], {"role": "assistant", "content": ""}]
        ids, _ = template.encode_oneturn(tokenizer, conversation, row["_system"] or None, row["_tools"] or None)
        same &= tokenizer.decode(ids) == want.prompt
    return same


@pytest.fixture(autouse=True)
def known_to_llamafactory(request: pytest.FixtureRequest) -> None:
    from llamafactory.data.template import TEMPLATES

    variant = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("variant")
    if variant is not None and variant.template not in TEMPLATES:
        pytest.skip(f"this LLaMA-Factory has no template {variant.template}")


@pytest.mark.parametrize(("variant", "case"), CELLS, ids=[f"{variant.id}-{case.id}" for variant, case in CELLS])
def test_cell(
    variant: Variant,
    case: Situation,
    tokenizer: Any,
    chat_templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = answers(variant, case, tokenizer, chat_templates[variant.chat_template], monkeypatch, "fix")
    assert said == dict.fromkeys(QUESTIONS, True)


def test_table(tokenizer: Any, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes how many cells hold, with LLaMA-Factory alone beside it: it must fail some, or nothing is tested."""
    lines = [
        "| variant | cells | with the fixer | LLaMA-Factory alone | alone, (a) to (e) | "
        + " | ".join(f"alone ({question})" for question in QUESTIONS)
        + " |",
        "|" + "---|" * (5 + len(QUESTIONS)),
    ]
    from llamafactory.data.template import TEMPLATES

    totals: Counter[str] = Counter()
    variants = [variant for variant in VARIANTS if variant.template in TEMPLATES]
    num_cells = len(variants) * len(SITUATIONS)
    for variant in variants:
        official = chat_templates[variant.chat_template]
        passed: Counter[str] = Counter()
        for case in SITUATIONS:
            fixed = answers(variant, case, tokenizer, official, monkeypatch, "fix")
            alone = answers(variant, case, tokenizer, official, monkeypatch, "off")
            passed["fixed"] += all(fixed.values())
            passed["alone"] += all(alone.values())
            passed["alone, but for stop tokens"] += all(alone[question] for question in "abcde")
            passed.update(question for question in QUESTIONS if alone[question])
        lines.append(_line(variant.id, len(SITUATIONS), passed))
        totals.update(passed)
    lines.append(_line("all", num_cells, totals))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    assert totals["fixed"] == num_cells
    assert totals["alone, but for stop tokens"] < num_cells / 2


def _line(name: str, num_cells: int, passed: Counter[str]) -> str:
    columns = ("fixed", "alone", "alone, but for stop tokens", *QUESTIONS)
    return f"| {name} | " + " | ".join(map(str, [num_cells, *(passed[column] for column in columns)])) + " |"


def test_the_switch_is_read(tokenizer: Any, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix would be worth nothing if `off` and `fix` were the same."""
    case = SITUATIONS[0]
    assert os.environ.get("LLAMAFACTORY_TEMPLATE") is None
    results = [
        answers(VARIANTS[0], case, tokenizer, chat_templates["qwen3"], monkeypatch, switch)
        for switch in ("fix", "off")
    ]
    assert results[0] != results[1]
