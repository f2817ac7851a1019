"""Renders with the model's own chat template, and turns the text into token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import jinja2

from llamafactory_preflight.templates.families import IM_END, THINK_END, Family, Mode
from llamafactory_preflight.templates.messages import BrokenSample, Message
from llamafactory_preflight.templates.ollama import Texts


# Stands in a text that only looks like a special token; no character, so no data has it.
MARK = "\ufdd0"
_SPELLED_MARK = ascii(MARK)[1:-1]  # in a list that a template prints as Python does
_HEADER = "<|im_start|>assistant\n"
_EARLIER = "\ufdd1"  # takes the place of an earlier answer
_PROBE: Message = {_EARLIER: [_EARLIER]}  # a tool
_QUESTION: Message = {"role": "user", "content": "?"}
_EARLIER_ANSWER: Message = {"role": "assistant", "content": _EARLIER, "reasoning_content": ""}


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

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """Special tokens that LLaMA-Factory writes into a text in place of images and videos."""
        is_media = self.family.is_multimodal
        return tuple(token for token in self.special_tokens if is_media and ("vision" in token or "_pad" in token))


@lru_cache(maxsize=8)
def _compiled(chat_template: str) -> jinja2.Template:
    """The template as transformers compiles it, but for the sandbox: it is an official one, known by its hash."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(chat_template)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


_GENERATION_PROMPTS: dict[tuple[Style, Mode], str] = {}


def chat_text(style: Style, messages: Sequence[Message], tools: Any, *, mode: Mode, is_prompt: bool) -> str:
    """The text of a conversation, the one that `apply_chat_template` gives.

    Raises:
        BrokenSample: The template refuses the conversation.
    """
    options: dict[str, Any] = {"enable_thinking": mode == "think"} if len(style.family.modes) > 1 else {}
    if style.preserve:
        options["preserve_thinking"] = True
    try:
        text: str = _compiled(style.chat_template).render(
            messages=list(messages), tools=tools, add_generation_prompt=is_prompt, **options
        )
    except jinja2.TemplateError as error:
        raise BrokenSample(f"the chat template refuses it: {error}") from None
    if _SPELLED_MARK in text:
        for token in style.special_tokens:
            text = text.replace(token[0] + _SPELLED_MARK + token[1:], token[0] + MARK + token[1:])
    return text


def pair_texts(
    style: Style, before: Sequence[Message], answer: Message, tools: Any, *, mode: Mode, follows: bool
) -> tuple[str, str]:
    """A prompt and what is trained after it, from one rendering of both.

    Args:
        style: How to render.
        before: What stands before the answer.
        answer: The answer.
        tools: The tools.
        mode: The answer's mode.
        follows: Whether `before` begins after another answer; the prompt is then what comes after its stop token.
    """
    if mode == "no_think" and answer.get("reasoning_content"):
        answer = answer | {"reasoning_content": ""}
    lead = [_QUESTION, _EARLIER_ANSWER] if follows else []
    full = chat_text(style, [*lead, *before, answer], tools, mode=mode, is_prompt=False)
    full = full.partition(_EARLIER + IM_END)[2] if follows else full
    # No text can hold a header, because what looks like one is escaped.
    prompt = full[: full.rindex(_HEADER)] + _generation_prompt(style, mode)
    if full.startswith(prompt):
        text = full[len(prompt) :].removesuffix("\n")
    else:  # without a question of the user, the templates render an answer in another way than its prompt
        prompt = chat_text(style, [*lead, *before], tools, mode=mode, is_prompt=True)
        prompt = prompt.partition(_EARLIER + IM_END)[2] if follows else prompt
        text = pair_texts(style, [_QUESTION], answer, None, mode=mode, follows=False)[1]
    reasoning, said = split_reasoning(style, text, mode=mode)
    return prompt + reasoning, said


def split_reasoning(style: Style, text: str, *, mode: Mode) -> tuple[str, str]:
    """What of an answer is shown but not trained, mostly nothing, and the rest."""
    if style.loss_on_reasoning or mode == "no_think" or THINK_END not in text:
        return "", text
    reasoning, end, said = text.partition(THINK_END)
    return reasoning + end, said


def _generation_prompt(style: Style, mode: Mode) -> str:
    known = _GENERATION_PROMPTS.get((style, mode))
    if known is None:
        question, prompt = (
            chat_text(style, [_QUESTION], None, mode=mode, is_prompt=is_prompt) for is_prompt in (False, True)
        )
        known = _GENERATION_PROMPTS[style, mode] = prompt.removeprefix(question)
    return known


def system_texts(style: Style) -> Texts:
    """What the template says around a list of tools, and what it says without being asked."""
    if style.family.tools_in_xml:
        return _texts_around_xml(style)
    shown, tool = _system_turn(style, [_PROBE]), json.dumps(_PROBE, ensure_ascii=False)
    before, _, after = shown.partition("\n" + tool)
    instruction = _system_turn(style, None)
    if instruction:
        before = before.removeprefix(instruction + "\n\n")
    return Texts(before_tools=before, after_tools=after, instruction=instruction)


def _texts_around_xml(style: Style) -> Texts:
    before, _, shown = _system_turn(style, [_PROBE]).partition("\n<function>\n")
    said = _system_turn(style, [_PROBE], {"role": "system", "content": _EARLIER}).removeprefix(_EARLIER)
    title = said.partition("\n<function>\n")[0]
    tool, _, after = shown.partition(f"</{_EARLIER}>\n</function>")
    return Texts(
        before_tools=title.removeprefix("\n\n"),
        after_tools=after,
        default=before.removesuffix(title),
        lists_in_json=tool.endswith('"]'),
    )


def _system_turn(style: Style, tools: list[Message] | None, *system: Message) -> str:
    """The first turn without its header and its end; empty if it is the user's."""
    text = chat_text(style, [*system, _QUESTION], tools, mode="think", is_prompt=False)
    start = "<|im_start|>system\n"
    return text.removeprefix(start).partition(IM_END)[0] if text.startswith(start) else ""


def escape(text: str, special_tokens: Sequence[str]) -> str:
    """Marks what looks like a special token, so that it stays text."""
    if "<" not in text:
        return text
    for token in special_tokens:
        if token in text:
            text = text.replace(token, token[0] + MARK + token[1:])
    return text


def encode(style: Style, tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts; what was escaped becomes the ids of its letters."""
    if any(MARK in text for text in texts):
        return [_encode_escaped(style, tokenizer, text) for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        made = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=False)
        return list(made["input_ids"])
    # Without what transformers does around it, half of which looks for where each token stands in the text.
    backend.encode_special_tokens = False
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    # One at a time: several would be shared out among threads, which costs more than it gains for so few.
    return [backend.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in texts]


def _encode_escaped(style: Style, tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, style.special_tokens)) + ")", text):
        is_text = MARK in piece
        clean = piece.replace(MARK, "")
        ids += tokenizer.encode(clean, add_special_tokens=False, split_special_tokens=is_text) if clean else []
    return ids
