"""The one rule for thinking: which prompt an answer is trained after, and what of a conversation is one sample."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.settings import EmptyThink
from llamafactory_preflight.templates.families import Family, Mode


OPEN, CLOSE = "<think>", "</think>"
# Without an opening tag, a closing one ends reasoning only where it stands as the models write it.
_CLOSE_ALONE = re.compile(r"(?:^|\n)[ \t]*</think>|</think>(?=\n\n)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer in its two parts.

    Attributes:
        reasoning: What was thought, without its tags and the line breaks around it; empty if there is none.
        text: What was said.
        is_unclosed: Whether a think tag was opened and never closed; then all of it is text.
    """

    reasoning: str = ""
    text: str
    is_unclosed: bool = False


def split_answer(content: str) -> Answer:
    """Takes reasoning and text apart, however the tags are spelled; a tag that is only mentioned is text."""
    if CLOSE not in content:
        return Answer(text=content, is_unclosed=content.lstrip().startswith(OPEN))
    start = content.lstrip()
    if start.startswith(OPEN):
        reasoning, _, text = start.removeprefix(OPEN).partition(CLOSE)
        return _answer(reasoning, text)
    alone = _CLOSE_ALONE.search(content)
    if alone is not None and OPEN not in content[: alone.start()]:
        return _answer(content[: alone.start()], content[alone.end() :])
    return Answer(text=content)


def _answer(reasoning: str, text: str) -> Answer:
    return Answer(reasoning=reasoning.strip("\n") if reasoning.strip() else "", text=text.lstrip("\n"))


def asked_for(value: object) -> bool | None:
    """What `enable_thinking` asks for; None leaves it to each sample. A YAML `None` arrives as a text.

    Raises:
        UserError: It is no value that there is.
    """
    if value is None or isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in {"none", "null", "auto", "~", ""}:
        return None
    if text in {"true", "false"}:
        return text == "true"
    raise UserError(f"enable_thinking: {value} is not a value", next_step="Set it to true, false or null")


def training_mode(
    family: Family, *, has_reasoning: bool, asked: bool | None, empty_think: EmptyThink = "mask"
) -> Mode:
    """The mode that an answer is trained in."""
    if len(family.modes) == 1:
        return family.modes[0]
    if asked is False:
        return "no_think"
    return "think" if has_reasoning or empty_think == "train" else "no_think"


def inference_mode(family: Family, *, asked: bool | None, default: Mode) -> Mode:
    """The mode of a prompt that has no answer yet; `default` where nobody asked for one."""
    if len(family.modes) == 1:
        return family.modes[0]
    if asked is None:
        return default
    return "think" if asked else "no_think"


def is_stable(
    family: Family, *, num_queries: int, modes: Sequence[Mode], has_reasoning: Sequence[bool], preserve: bool
) -> bool:
    """Whether the last answer's prompt holds all earlier answers as they are trained, so one sample serves all.

    It never becomes true again for a longer conversation once it was false.

    Args:
        family: What the template does.
        num_queries: Number of the user's questions, results of tools not counted.
        modes: Mode of each answer.
        has_reasoning: Whether each answer has reasoning.
        preserve: Whether `preserve_thinking` was set.
    """
    if len(modes) <= 1 or (family.keeps_history and not family.reasons):
        return True
    if len(set(modes)) > 1:
        return False
    if family.keeps_history or (family.has_preserve_thinking and preserve):
        return True
    return num_queries <= 1 and (family.blocks_in_chain or all(has_reasoning))
