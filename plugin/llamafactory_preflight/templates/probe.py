"""The fixed set of conversations on which LLaMA-Factory's template is compared with the model's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


Message = dict[str, Any]

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds.",
                "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            },
        }
    ]
)
CALL = '{"name": "add", "arguments": {"x": 1}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One conversation, in LLaMA-Factory's format.

    Attributes:
        id: Names the finding if the two differ.
        about: What is compared, as the subject of a sentence.
        topic: Which repair it belongs to, one of `audit.REPAIRS`.
        messages: Roles and contents.
        system: The system text.
        tools: The tools, in JSON.
        is_served: Whether to compare the prompt of the chat page and the API instead of what is trained.
    """

    id: str
    about: str
    topic: str
    messages: tuple[Message, ...]
    system: str | None = None
    tools: str | None = None
    is_served: bool = field(default=False)


def _turns(*contents: tuple[str, str]) -> tuple[Message, ...]:
    return tuple({"role": role, "content": content} for role, content in contents)


_QUESTION = ("user", "1 + 1?")
_ANSWER = ("assistant", "2")
_REASONED = ("assistant", "<think>\nEasy.\n</think>\n\n2")
_RESULT = ("observation", "2")

PROBES = (
    Probe(id="no-reasoning", about="an answer without reasoning", topic="loss", messages=_turns(_QUESTION, _ANSWER)),
    Probe(id="reasoning", about="an answer with reasoning", topic="loss", messages=_turns(_QUESTION, _REASONED)),
    Probe(
        id="history",
        about="a second answer after one without reasoning",
        topic="earlier turns",
        messages=_turns(_QUESTION, _ANSWER, _QUESTION, _ANSWER),
    ),
    Probe(
        id="history-reasoning",
        about="a second answer after one with reasoning",
        topic="earlier turns",
        messages=_turns(_QUESTION, _REASONED, _QUESTION, _REASONED),
    ),
    Probe(
        id="think-spelling",
        about="reasoning in tags without line breaks",
        topic="think tags",
        messages=_turns(_QUESTION, ("assistant", "<think>Easy.</think>2")),
    ),
    Probe(
        id="think-mentioned",
        about="an answer that mentions the tag",
        topic="think tags",
        messages=_turns(_QUESTION, ("assistant", "The tag is `<think>`.")),
    ),
    Probe(id="system", about="a system text", topic="loss", messages=_turns(_QUESTION, _ANSWER), system="Be brief."),
    Probe(
        id="tools-without-system",
        about="tools without a system text",
        topic="tools",
        messages=_turns(_QUESTION, ("function", CALL)),
        tools=TOOLS,
    ),
    Probe(
        id="tools-with-system",
        about="tools with a system text",
        topic="tools",
        messages=_turns(_QUESTION, ("function", CALL)),
        system="Be brief.",
        tools=TOOLS,
    ),
    Probe(
        id="tool-chain",
        about="the answer after a call",
        topic="tools",
        messages=_turns(_QUESTION, ("function", CALL), _RESULT, _ANSWER),
        tools=TOOLS,
    ),
    Probe(
        id="tool-chain-reasoning",
        about="the answer after a call with reasoning",
        topic="tools",
        messages=_turns(_QUESTION, ("function", f"<think>\nAdd.\n</think>\n\n{CALL}"), _RESULT, _REASONED),
        tools=TOOLS,
    ),
    Probe(
        id="text-with-calls",
        about="text with two calls",
        topic="tools",
        messages=_turns(
            _QUESTION,
            ("function", f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ),
        tools=TOOLS,
    ),
    Probe(
        id="special-token-in-text",
        about="a special token in a user's text",
        topic="special tokens",
        messages=_turns(("user", "What is <|im_end|>?"), _ANSWER),
    ),
    Probe(
        id="served",
        about="the prompt of chat and API",
        topic="chat and API",
        messages=_turns(_QUESTION, _ANSWER),
        is_served=True,
    ),
    Probe(
        id="served-history",
        about="the prompt of chat and API after a call with reasoning",
        topic="chat and API",
        messages=_turns(_QUESTION, ("function", f"<think>\nAdd.\n</think>\n\n{CALL}"), _RESULT, _ANSWER),
        tools=TOOLS,
        is_served=True,
    ),
)
