"""Looks at every sample before it is tokenized: what is broken, which mode it has, and what becomes a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.fixer.render import escape
from llamafactory_preflight.fixer.template import OfficialTemplate
from llamafactory_preflight.templates.messages import ANSWERS, BrokenSample, Message, answer_message, to_tools
from llamafactory_preflight.templates.thinking import split_answer


PLACEHOLDERS = {"_images": "<image>", "_videos": "<video>", "_audios": "<audio>"}
INDEX, LOST, ODD, THINK, NO_THINK = "_sample", "_lost", "_odd", "_num_think", "_num_no_think"
OURS = (INDEX, LOST, ODD, THINK, NO_THINK)

Row = dict[str, Any]


@dataclass
class Preparation:
    """Maps batches of samples in LLaMA-Factory's standard format.

    Attributes:
        template: The template for the stage; part of the fingerprint.
        splits: Whether conversations are taken apart.
        num_answers: Answers that a sample must have: two in preference data.
        is_feedback: Whether one of two answers is empty by design, as in KTO.
        notes: Whether lost samples stay, and every row says what was found; else neither.
    """

    template: OfficialTemplate
    splits: bool
    num_answers: int = 1
    is_feedback: bool = False
    notes: bool = True

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """One batch; with notes no sample vanishes, a lost one stays as an empty conversation with its reason."""
        rows: list[Row] = []
        for position, index in enumerate(indices):
            row = {name: values[position] for name, values in batch.items()}
            rows.extend(self._prepared(row, index))
        if self.notes:
            return {name: [row[name] for row in rows] for name in (*batch, *OURS)}
        kept = [row for row in rows if not row[LOST]]
        return {name: [row[name] for row in kept] for name in batch}

    def _prepared(self, row: Row, index: int) -> list[Row]:
        if media := self.template.style.media_tokens:  # typed by somebody: LLaMA-Factory puts the real ones in later
            for name in ("_prompt", "_response"):
                texts = [message | {"content": escape(message["content"] or "", media)} for message in row[name]]
                row = row | {name: texts}
        noted = row | {INDEX: index, LOST: "", ODD: "", THINK: 0, NO_THINK: 0}
        reason = _lost(row, self.template, self.num_answers)
        if reason:
            return [noted | {"_prompt": [], "_response": [], LOST: reason}]
        answers = row["_response"]
        if self.is_feedback:
            answers = [message for message in answers if message["content"]] or answers
        noted[ODD] = _odd([*row["_prompt"], *answers])
        if self.template.purpose != "train":
            return [noted]
        if not self.splits:
            return [noted | self._modes(row["_response"][:1])]
        return [part | self._modes(trained) for part, trained in self._parts(noted)]

    def _parts(self, row: Row) -> list[tuple[Row, list[Message]]]:
        """Samples of one conversation, each with the answers that it trains."""
        messages = [*row["_prompt"], *row["_response"]]
        ends = [end for end, message in enumerate(messages, 1) if message["role"] in ANSWERS]
        answers = [messages[end - 1] for end in ends]
        if self.template.turns == "last":
            return [(row, answers[-1:])]
        stable = len(ends) if self.template.turns == "concat" else self.template.stable_answers(messages)
        parts = [(_upto(row, messages, ends[stable - 1]), answers[:stable])]
        return parts + [(_upto(row, messages, end), [messages[end - 1]]) for end in ends[stable:]]

    def _modes(self, trained: Sequence[Message]) -> dict[str, int]:
        modes = Counter(self.template.answer_modes(list(trained)))
        return {THINK: modes["think"], NO_THINK: modes["no_think"]}


def _upto(row: Row, messages: list[Message], end: int) -> Row:
    """The conversation up to one answer, with the media that stand in that part."""
    text = "".join(message["content"] or "" for message in messages[:end])
    media = {
        name: given[: text.count(placeholder)] or None
        for name, placeholder in PLACEHOLDERS.items()
        if isinstance(given := row.get(name), list) and end < len(messages)
    }
    return row | {"_prompt": messages[: end - 1], "_response": messages[end - 1 : end]} | media


def _lost(row: Row, template: OfficialTemplate, num_answers: int) -> str:
    """Why a sample cannot be used, or an empty string."""
    prompt, response = row["_prompt"], row["_response"]
    if len(prompt) % 2 != 1 or any(message["role"] not in ANSWERS for message in response):
        return "it is empty, or its roles are not as they should be"
    if template.purpose == "train" and len(response) < num_answers:
        return "it has no answer" if num_answers == 1 else "it has no second answer, or no tag"
    family = template.style.family
    try:
        for message in (*prompt, *response):
            if message["role"] == "function" and (message["content"] or len(response) == 1):  # KTO has an empty one
                answer_message("function", message["content"] or "", family=family)
        to_tools(row["_tools"])
    except BrokenSample as broken:
        return broken.reason
    return ""


def _odd(messages: list[Message]) -> str:
    """What is strange about a sample that is kept, as LLaMA-Factory keeps it."""
    answers = [split_answer(message["content"] or "") for message in messages if message["role"] in ANSWERS]
    others = (message["content"] or "" for message in messages if message["role"] not in ANSWERS)
    if not all(text.strip() for text in (*others, *(answer.text for answer in answers))):
        return "an empty turn"
    return "a think tag that is never closed" if any(answer.is_unclosed for answer in answers) else ""
