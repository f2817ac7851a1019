"""Turns the messages that LLaMA-Factory keeps into those that a chat template is made for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from llamafactory_preflight.templates.families import Family
from llamafactory_preflight.templates.thinking import Answer, split_answer


Message = dict[str, Any]

ANSWERS = ("assistant", "function")
RESULTS_BETWEEN = "\n</tool_response>\n<tool_response>\n"  # LLaMA-Factory joins results of several tools so
_CALL_START = re.compile(r"<tool_call>\s*")
_CALL_END = re.compile(r"\s*</tool_call>")


class BrokenSample(Exception):
    """A sample that cannot be rendered.

    Args:
        reason: What is wrong with it, without the data itself.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def to_official(messages: Sequence[Message], *, family: Family, system: str | None) -> list[Message]:
    """The same conversation with roles, reasoning and tool calls as `apply_chat_template` wants them.

    Raises:
        BrokenSample: A call is not what it should be.
    """
    official: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        role, content = message["role"], message["content"] or ""
        if role in ANSWERS:
            official.append(answer_message(role, content, family=family))
        elif role == "observation":
            official.extend({"role": "tool", "content": result} for result in content.split(RESULTS_BETWEEN))
        else:
            official.append({"role": role, "content": content})
    return official


def answer_message(role: str, content: str, *, family: Family) -> Message:
    """One answer: reasoning apart where the template knows it, and calls apart from text."""
    answer = split_answer(content) if family.reasons else Answer(text=content)
    message: Message = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}
    if role == "function":
        message["content"], calls = _calls(answer.text)
        if calls:
            message["tool_calls"] = calls
    return message


def _calls(content: str) -> tuple[str, list[Message]]:
    """The text of an answer and its calls; reasoning that is mere text to this template stays before the text."""
    answer = split_answer(content)
    reasoning = content[: len(content) - len(answer.text)] if answer.reasoning else ""
    starts = [match.end() for match in _CALL_START.finditer(answer.text)]
    if starts and all(answer.text.startswith("<function=", start) for start in starts):
        return content, []  # written in the model's own way already
    said, calls = _taken_apart(answer.text)
    if not calls:
        raise BrokenSample("a call is missing")
    return reasoning + said, [{"type": "function", "function": _function(call)} for call in calls]


def only_calls(text: str) -> list[Any] | None:
    """The calls of a text that is JSON and nothing else, whatever tags its arguments hold; None for any other."""
    try:
        given = json.loads(text)
    except ValueError:
        return None
    return given if isinstance(given, list) else [given]


def _taken_apart(text: str) -> tuple[str, list[Any]]:
    """What is said around calls in tags, and the calls."""
    if (alone := only_calls(text)) is not None:
        return "", alone
    pieces: list[str] = []
    calls: list[Any] = []
    at = 0
    while (start := _CALL_START.search(text, at)) is not None:
        try:
            given, end = json.JSONDecoder().raw_decode(text, start.end())
        except ValueError:
            _refused()
        stop = _CALL_END.match(text, end) or _refused()
        pieces.append(text[at : start.start()])
        calls.extend(given if isinstance(given, list) else [given])
        at = stop.end()
    if not at:
        _refused()
    pieces.append(text[at:])
    return "\n".join(filter(None, (piece.strip("\n") for piece in pieces))), calls


def _refused() -> NoReturn:
    raise BrokenSample("a call is not JSON")


def _function(call: Any) -> Message:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BrokenSample("a call has no name")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI has them
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise BrokenSample("the arguments of a call are not JSON") from None
    if not isinstance(arguments, dict):
        raise BrokenSample("the arguments of a call are no object")
    return {"name": call["name"], "arguments": arguments}


def to_tools(tools: str | None) -> list[Message] | None:
    """The tools of a sample, each in the wrapper that the official templates print.

    Raises:
        BrokenSample: They are not a list of JSON objects.
    """
    if not tools:
        return None
    try:
        given = json.loads(tools)
    except ValueError:
        raise BrokenSample("the tools are not JSON") from None
    listed = given if isinstance(given, list) else [given]
    if not all(isinstance(tool, dict) for tool in listed):
        raise BrokenSample("the tools are not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed] or None


def num_queries(messages: Sequence[Message]) -> int:
    """How many of the messages are questions to the official templates."""
    questions = (message["content"].strip() for message in messages if message["role"] == "user")
    return sum(not (text.startswith("<tool_response>") and text.endswith("</tool_response>")) for text in questions)
