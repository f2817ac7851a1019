"""Renders with the model's own chat template, and turns the text into token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from llamafactory_preflight.templates.families import IM_END, THINK_END, Family, Mode
from llamafactory_preflight.templates.messages import BrokenSample, Message


# Stands in a text that only looks like a special token; no character, so no data has it.
MARK = "\ufdd0"
_HEADER = "<|im_start|>assistant\n"
_EARLIER = "\ufdd1"  # takes the place of an earlier answer
_QUESTION: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How to render: the template, and what LLaMA-Factory was asked for.

    Attributes:
        family: What the template does.
        chat_template: The model's own template, without a default of ours.
        special_tokens: What counts as a special token to the tokenizer.
        preserve: Whether to keep the reasoning of earlier answers.
        loss_on_reasoning: Whether reasoning belongs to what is trained.
    """

    family: Family
    chat_template: str
    special_tokens: tuple[str, ...]
    preserve: bool = False
    loss_on_reasoning: bool = True


def chat_text(
    style: Style, tokenizer: Any, messages: Sequence[Message], tools: Any, *, mode: Mode, is_prompt: bool
) -> str:
    """The text of a conversation, by `apply_chat_template`.

    Raises:
        BrokenSample: The template refuses the conversation.
    """
    options: dict[str, Any] = {"enable_thinking": mode == "think"} if len(style.family.modes) > 1 else {}
    if style.preserve:
        options["preserve_thinking"] = True
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=style.chat_template,
            add_generation_prompt=is_prompt,
            tokenize=False,
            **options,
        )
    except jinja2.TemplateError as error:
        raise BrokenSample(f"the chat template refuses it: {error}") from None
    return text


def answer_text(style: Style, tokenizer: Any, answer: Message, *, mode: Mode) -> tuple[str, str]:
    """What is trained of an answer, and what goes before it into the prompt (reasoning without loss, or nothing).

    The family's templates render the last answer in the same way after any question, so a short one will do.
    """
    if mode == "no_think" and answer.get("reasoning_content"):
        answer = answer | {"reasoning_content": ""}
    prompt = chat_text(style, tokenizer, [_QUESTION], None, mode=mode, is_prompt=True)
    full = chat_text(style, tokenizer, [_QUESTION, answer], None, mode=mode, is_prompt=False)
    assert full.startswith(prompt), f"{style.family.name}: the answer does not follow its prompt"
    text = full[len(prompt) :].removesuffix("\n")
    if style.loss_on_reasoning or mode == "no_think" or THINK_END not in text:
        return "", text
    reasoning, end, said = text.partition(THINK_END)
    return reasoning + end, said


def later_prompt(style: Style, tokenizer: Any, between: Sequence[Message], *, mode: Mode) -> str:
    """What stands between an answer's stop token and the next answer."""
    earlier: Message = {"role": "assistant", "content": _EARLIER, "reasoning_content": ""}
    text = chat_text(style, tokenizer, [_QUESTION, earlier, *between], None, mode=mode, is_prompt=True)
    return text.partition(_EARLIER + IM_END)[2]


def escape(text: str, special_tokens: Sequence[str]) -> str:
    """Marks what looks like a special token, so that it stays text."""
    if "<" not in text:
        return text
    for token in special_tokens:
        if token in text:
            text = text.replace(token, token[0] + MARK + token[1:])
    return text


def encode(style: Style, tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered text; what was escaped becomes the ids of its letters."""
    ids: list[int]
    if MARK not in text:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids
    ids = []
    for piece in re.split("(" + "|".join(map(re.escape, style.special_tokens)) + ")", text):
        is_text = MARK in piece
        clean = piece.replace(MARK, "")
        ids += tokenizer.encode(clean, add_special_tokens=False, split_special_tokens=is_text) if clean else []
    return ids
