"""Prepares records for LLaMA-Factory's converters, which want strictly alternating roles and plain texts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from llamafactory_preflight.fixer.rules import rules
from llamafactory_preflight.templates.messages import RESULTS_BETWEEN, only_calls
from llamafactory_preflight.templates.thinking import split_answer


Record = dict[str, Any]


@dataclass
class RepairingConverter:
    """Calls LLaMA-Factory's converter with a record that it does not garble.

    Attributes:
        inner: LLaMA-Factory's converter.
        formatting: `sharegpt` or `openai`.
        rules: Hash of the code, part of the fingerprint of what is kept on disk; see `fixer.rules`.
    """

    inner: Any
    formatting: str
    rules: str = field(default_factory=rules)

    def __call__(self, example: Record) -> Record:
        """One record in LLaMA-Factory's standard format."""
        attr = self.inner.dataset_attr
        if attr.messages not in example:  # a wrong column name, of which LLaMA-Factory says so
            return self._converted(example)
        rivals = [name for name in (attr.chosen, attr.rejected) if name and isinstance(example.get(name), dict)]
        given = [*(example[attr.messages] or ()), *(example[name] for name in rivals)]
        is_openai = self.formatting == "openai"
        if is_openai:
            given = [_plain(message, attr) if isinstance(message, dict) else message for message in given]
        if not all(_is_readable(message, attr) for message in given):
            return self._converted(example | {attr.messages: []})  # has no prompt, and is counted as broken
        answers = given[len(given) - len(rivals) :]
        merged = _merged(given[: len(given) - len(rivals)], attr)
        record = self._converted(example | {attr.messages: merged} | dict(zip(rivals, answers, strict=True)))
        if is_openai:  # LLaMA-Factory writes `detailed thinking off` into the system text
            has_system = attr.system_tag and merged and merged[0].get(attr.role_tag) == attr.system_tag
            column = example.get(attr.system) if attr.system else None
            record["_system"] = (merged[0].get(attr.content_tag) if has_system else column) or ""
        tools = example.get(attr.tools) if attr.tools else None
        if isinstance(tools, (list, dict)):
            record["_tools"] = json.dumps(_without_filling(tools), ensure_ascii=False)
        return record

    def _converted(self, example: Record) -> Record:
        record: Record = self.inner(example)
        return record


def _is_readable(message: Any, attr: Any) -> bool:
    """Whether LLaMA-Factory's converter gets over a message; what it makes of the order is another matter."""
    roles = {attr.user_tag, attr.assistant_tag, attr.observation_tag, attr.function_tag, attr.system_tag} - {None}
    return (
        isinstance(message, dict)
        and message.get(attr.role_tag) in roles
        and isinstance(message.get(attr.content_tag), str | None)
    )


def _plain(message: Record, attr: Any) -> Record:
    """An OpenAI message whose content holds its reasoning and its calls too."""
    role, content = message.get(attr.role_tag), message.get(attr.content_tag)
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    content = content or ""
    calls = message.get("tool_calls") or []
    if role in (attr.assistant_tag, attr.function_tag) and calls:
        functions = [call.get("function") or call if isinstance(call, dict) else call for call in calls]
        content = _with_calls(content, functions)
        role = attr.function_tag
    reasoning = message.get("reasoning_content")
    if role in (attr.assistant_tag, attr.function_tag) and isinstance(reasoning, str) and reasoning.strip():
        content = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n{content}"
    return {attr.role_tag: role, attr.content_tag: content}


def _with_calls(text: str, functions: list[Any]) -> str:
    blocks = [
        f"<tool_call>\n{json.dumps(_decoded(function), ensure_ascii=False)}\n</tool_call>" for function in functions
    ]
    return "\n".join(([text] if text else []) + blocks)


def _decoded(function: Any) -> Any:
    """Name and arguments; OpenAI has the arguments as a text. What is no JSON stays and is counted as broken later."""
    if not isinstance(function, dict):
        return function
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass
    else:
        arguments = _without_filling(arguments)
    return {"name": function.get("name"), "arguments": arguments if arguments is not None else {}}


def _without_filling(value: Any) -> Any:
    """Without the nulls of `datasets`, which fills every object with the keys of all others in its column."""
    if isinstance(value, list):
        return [_without_filling(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_filling(item) for name, item in value.items() if item is not None}
    return value


def _merged(messages: list[Record], attr: Any) -> list[Record]:
    """Joins what belongs to one turn: results of several tools, text with its call, calls in a row."""
    role, content = attr.role_tag, attr.content_tag
    merged: list[Record] = []
    for message in messages:
        before, now = (merged[-1].get(role) if merged else None), message.get(role)
        if merged and before == now == attr.observation_tag:
            merged[-1][content] = f"{merged[-1].get(content) or ''}{RESULTS_BETWEEN}{message.get(content) or ''}"
        elif merged and now == attr.function_tag and before in (attr.assistant_tag, attr.function_tag):
            merged[-1] = {**message, content: _joined_calls(merged[-1], message, attr)}
        else:
            merged.append({**message})
    return merged


def _joined_calls(first: Record, second: Record, attr: Any) -> str:
    parts = []
    for message in (first, second):
        text = str(message.get(attr.content_tag) or "").strip("\n")
        if message.get(attr.role_tag) == attr.function_tag:
            text = _as_block(text)
        parts.append(text)
    return "\n".join(part for part in parts if part)


def _as_block(text: str) -> str:
    """The same answer with tags around each call that is mere JSON."""
    said = split_answer(text).text
    calls = only_calls(said)
    if calls is None:
        return text
    blocks = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return text[: len(text) - len(said)] + "\n".join(blocks)
