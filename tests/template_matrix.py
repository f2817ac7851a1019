"""Variants and situations of the template tests, and an oracle that knows nothing of the plugin.

A situation is written twice: as a record in a dataset, and as the messages that `apply_chat_template` is made for.
What must come out is rendered from the latter with the official template alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


Message = dict[str, Any]

# What Qwen3-Coder's later revision says in other words than the first one.
LATER_CODER = (
    (r'"\n\nYou have access', r'"\n\n# Tools\n\nYou have access'),
    (
        "json_dict[json_key] is mapping %}",
        "json_dict[json_key] is mapping or (json_dict[json_key] is sequence and json_dict[json_key] is not string) %}",
    ),
    ("if args_value is mapping", "if args_value is mapping or (args_value is sequence and args_value is not string)"),
)
IM_START, IM_END, END_OF_TEXT = 151644, 151645, 151643
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    for name in ("add", "sub")
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model and how it is trained.

    Attributes:
        id: Name in the report.
        chat_template: Name of the official template.
        template: LLaMA-Factory's name that its documentation gives.
        enable_thinking: What the run says.
        modes: Modes with a prompt of their own.
        has_reasoning_part: Whether the template knows reasoning.
    """

    id: str
    chat_template: str
    template: str
    enable_thinking: bool | None = None
    modes: tuple[str, ...] = ("think", "no_think")
    has_reasoning_part: bool = True


VARIANTS = (
    Variant(id="hybrid thinking", chat_template="qwen3", template="qwen3"),
    Variant(id="hybrid no-think", chat_template="qwen3", template="qwen3", enable_thinking=False),
    Variant(
        id="Instruct-2507",
        chat_template="qwen3_instruct_2507",
        template="qwen3_nothink",
        modes=("no_think",),
        has_reasoning_part=False,
    ),
    Variant(id="Thinking-2507", chat_template="qwen3_thinking_2507", template="qwen3", modes=("think",)),
    Variant(
        id="VL", chat_template="qwen3_vl", template="qwen3_vl_nothink", modes=("no_think",), has_reasoning_part=False
    ),
    Variant(id="VL-Thinking", chat_template="qwen3_vl_thinking", template="qwen3_vl", modes=("think",)),
    Variant(
        id="Coder",
        chat_template="qwen3_coder",
        template="qwen3_nothink",
        modes=("no_think",),
        has_reasoning_part=False,
    ),
    Variant(id="3.5 small", chat_template="qwen3_5_nothink", template="qwen3_5"),
    Variant(id="3.5 large", chat_template="qwen3_5_think", template="qwen3_5"),
    Variant(id="3.6", chat_template="qwen3_6", template="qwen3_6"),
    Variant(id="3.8", chat_template="qwen3_8", template="qwen3_6"),
)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One conversation, twice.

    Attributes:
        id: Name in the report.
        record: What stands in the dataset.
        messages: The same for `apply_chat_template`; `written` is an answer as it stands in the dataset.
        formatting: The dataset's format.
        tools: Whether the tools belong to it.
        cutoff_len: The run's limit.
        has_special_text: Whether a text looks like a special token.
    """

    id: str
    record: dict[str, Any]
    messages: list[Message]
    formatting: str = "sharegpt"
    tools: bool = False
    cutoff_len: int = 2048
    has_special_text: bool = field(default=False)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "", *, written: str | None = None, calls: tuple[str, ...] = ()) -> Message:
    """An answer; `written` is how a dataset spells it."""
    if written is None:
        written = (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + text
    message: Message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "written": written}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": {"x": 1}}} for name in calls
        ]
    return message


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


def call_text(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]})


def sharegpt(messages: list[Message], tools: bool = False) -> dict[str, Any]:
    """The record of a conversation; each message of a dataset is one element, as people write them."""
    names = {"user": "human", "tool": "observation", "system": "system"}
    turns = []
    for message in messages:
        if message["role"] != "assistant":
            turns.append({"from": names[message["role"]], "value": message["content"]})
        elif "tool_calls" in message:
            calls = [call_text(call["function"]) for call in message["tool_calls"]]
            value = calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]"
            thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message["reasoning_content"] else ""
            if message["content"]:
                turns.append({"from": "gpt", "value": thought + message["content"]})
            else:
                value = thought + value
            turns.append({"from": "function_call", "value": value})
        else:
            turns.append({"from": "gpt", "value": message["written"]})
    return {"conversations": turns} | ({"tools": json.dumps(TOOLS)} if tools else {})


def openai(messages: list[Message], tools: bool = False) -> dict[str, Any]:
    """The record as OpenAI's API has it: arguments in a text, reasoning in a field of its own."""
    turns = []
    for message in messages:
        turn = {key: value for key, value in message.items() if key in ("role", "content")}
        if message.get("reasoning_content"):
            turn["reasoning_content"] = message["reasoning_content"]
        if "tool_calls" in message:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call["function"]["name"], "arguments": '{"x": 1}'}}
                for call in message["tool_calls"]
            ]
        turns.append(turn)
    return {"messages": turns} | ({"tools": json.dumps(TOOLS)} if tools else {})


def situation(id: str, messages: list[Message], *, tools: bool = False, **options: Any) -> Situation:
    make = openai if options.get("formatting") == "openai" else sharegpt
    return Situation(id=id, record=make(messages, tools), messages=messages, tools=tools, **options)


SPELLINGS = {
    "official": "<think>\nr1\nr2\n</think>\n\nyes",
    "no line breaks": "<think>r1\nr2</think>yes",
    "one line break": "<think>r1\nr2</think>\nyes",
    "three line breaks": "<think>\n\nr1\nr2\n\n</think>\n\n\nyes",
    "leading line break": "\n<think>\nr1\nr2\n</think>\n\nyes",
    "no opening tag": "r1\nr2\n</think>\n\nyes",
}
THREE = [user("q1"), answer("a1"), user("q2"), answer("a2"), user("q3"), answer("a3")]
REASONED = [user("q1"), answer("a1", "r1"), user("q2"), answer("a2", "r2"), user("q3"), answer("a3", "r3")]
CHAIN = [
    user("q"),
    answer("", "r1", calls=("add",)),
    result("1"),
    answer("", "r2", calls=("sub",)),
    result("2"),
    answer("done", "r3"),
]
SITUATIONS = (
    situation("1 turn", [user("hi"), answer("yo")]),
    situation("3 turns, no reasoning", THREE),
    situation("3 turns, reasoning in all", REASONED),
    situation("3 turns, reasoning in some", [*THREE[:2], *REASONED[2:4], *THREE[4:]]),
    situation("system", [{"role": "system", "content": "S"}, *THREE[:2]]),
    situation("tools without system", [user("q"), answer("", calls=("add",))], tools=True),
    situation(
        "tools with system", [{"role": "system", "content": "S"}, user("q"), answer("", calls=("add",))], tools=True
    ),
    situation("tool chain with reasoning", CHAIN, tools=True),
    situation(
        "parallel calls",
        [user("q"), answer("Wait.", calls=("add", "sub")), result("1"), result("2"), answer("done")],
        tools=True,
    ),
    *(
        situation(f"think spelling: {name}", [user("q"), answer("yes", "r1\nr2", written=written)])
        for name, written in SPELLINGS.items()
    ),
    situation("think only mentioned", [user("q"), answer("Write `<think>` and `</think>` around it.")]),
    situation("openai string arguments", CHAIN, tools=True, formatting="openai"),
    situation("openai without system", [user("q"), answer("a", "r")], formatting="openai"),
    situation("truncated", [user(" ".join(f"word{n}" for n in range(200))), answer("yes")], cutoff_len=160),
    situation("leading newlines", [user("q"), answer("\n\nyes")]),
    situation(
        "special tokens in text",
        [user("a<|im_end|>b<|im_start|>"), answer("It is <|im_end|>, <|endoftext|>.")],
        has_special_text=True,
    ),
    situation("Chinese and emoji", [user("你好，世界 👩‍👩‍👧"), answer("好的 🤖。", "想一想")]),
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One answer that must be trained.

    Attributes:
        mode: In this mode.
        prompt: After this text.
        text: This text, stop token included.
        before: The official messages before it.
    """

    mode: str
    prompt: str
    text: str
    before: list[Message]


def official_messages(variant: Variant, messages: list[Message]) -> list[Message]:
    """What the model's own template is given: reasoning is a part of an answer only where it knows it."""
    shown = []
    for message in messages:
        message = dict(message)
        written = message.pop("written", None)
        if message["role"] == "assistant" and not variant.has_reasoning_part:
            reasoning = message.pop("reasoning_content")
            if "tool_calls" not in message:
                message["content"] = written
            elif reasoning:
                message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
        elif message["role"] == "assistant" and variant.enable_thinking is False:
            message["reasoning_content"] = ""
        shown.append(message)
    return shown


def render(tokenizer: Any, chat_template: str, messages: list[Message], tools: bool, **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tools=TOOLS if tools else None, chat_template=chat_template, tokenize=False, **options
    )
    return text


def expected(variant: Variant, case: Situation, tokenizer: Any, chat_template: str) -> Iterator[Expected]:
    """What must be trained of a conversation, one answer after the other."""
    messages = official_messages(variant, case.messages)
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if len(variant.modes) == 1:
            mode = variant.modes[0]
        else:
            mode = "think" if message["reasoning_content"] else "no_think"
        options = {"enable_thinking": mode == "think"}
        before = messages[:position]
        prompt = render(tokenizer, chat_template, before, case.tools, add_generation_prompt=True, **options)
        full = render(tokenizer, chat_template, messages[: position + 1], case.tools, **options)
        assert full.startswith(prompt) and full.endswith("<|im_end|>\n"), "the oracle does not hold here"
        yield Expected(mode=mode, prompt=prompt, text=full[len(prompt) : -1], before=before)
