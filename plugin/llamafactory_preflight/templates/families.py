"""Recognises the chat template of a tokenizer, and knows what each template of the Qwen3 family does.

A template is known by the hash of its normal form: its tokens without comments and without the white space between
them, so that an indented copy is the same one. A copy that somebody changed is not, and is not trusted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jinja2


Mode = Literal["think", "no_think"]

IM_END, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
EMPTY_THINK = "<think>\n\n</think>\n\n"
THINK_END = "</think>\n\n"

# Ours, before the model's own template: another default, which the caller can still set.
_DEFAULT = "{%%- if enable_thinking is not defined %%}{%%- set enable_thinking = %s %%}{%%- endif %%}\n"
_DEFAULTS: dict[Mode, str] = {"think": _DEFAULT % "true", "no_think": _DEFAULT % "false"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One official chat template and what follows from it.

    Attributes:
        name: How we call it to the user.
        template: LLaMA-Factory's name that belongs to it.
        modes: Modes that the template has a prompt for; the first one is its own default.
        keeps_history: Whether earlier answers stay in a prompt as they were trained.
        blocks_in_chain: Whether every answer after the last question gets a think block, even an empty one.
        has_preserve_thinking: Whether `preserve_thinking` keeps the reasoning of earlier answers.
        calls_in_xml: Whether calls are written as XML, not as JSON.
        tools_in_xml: Whether the list of tools is, too.
        is_multimodal: Whether images and videos may stand in a prompt.
    """

    name: str
    template: str
    modes: tuple[Mode, ...]
    keeps_history: bool = False
    blocks_in_chain: bool = False
    has_preserve_thinking: bool = False
    calls_in_xml: bool = False
    tools_in_xml: bool = False
    is_multimodal: bool = False

    @property
    def reasons(self) -> bool:
        """Whether reasoning is a part of its own in an answer, and not just text."""
        return "think" in self.modes


HYBRID = Family(name="Qwen3", template="qwen3", modes=("think", "no_think"))
INSTRUCT_2507 = Family(name="Qwen3-Instruct-2507", template="qwen3_nothink", modes=("no_think",), keeps_history=True)
THINKING_2507 = Family(name="Qwen3-Thinking-2507", template="qwen3", modes=("think",))
VL = Family(name="Qwen3-VL", template="qwen3_vl_nothink", modes=("no_think",), keeps_history=True, is_multimodal=True)
VL_THINKING = Family(name="Qwen3-VL-Thinking", template="qwen3_vl", modes=("think",), is_multimodal=True)
CODER = Family(
    name="Qwen3-Coder",
    template="qwen3_nothink",
    modes=("no_think",),
    keeps_history=True,
    calls_in_xml=True,
    tools_in_xml=True,
)
QWEN3_5 = Family(
    name="Qwen3.5 (4B and larger)",
    template="qwen3_5",
    modes=("think", "no_think"),
    blocks_in_chain=True,
    calls_in_xml=True,
    is_multimodal=True,
)
QWEN3_5_SMALL = Family(
    name="Qwen3.5 (2B and smaller)",
    template="qwen3_5",
    modes=("no_think", "think"),
    blocks_in_chain=True,
    calls_in_xml=True,
    is_multimodal=True,
)
QWEN3_6 = Family(
    name="Qwen3.6",
    template="qwen3_6",
    modes=("think", "no_think"),
    blocks_in_chain=True,
    calls_in_xml=True,
    has_preserve_thinking=True,
    is_multimodal=True,
)
QWEN3_8 = Family(
    name="Qwen3.8",
    template="qwen3_6",
    modes=("think", "no_think"),
    keeps_history=True,
    blocks_in_chain=True,
    calls_in_xml=True,
    is_multimodal=True,
)

# LLaMA-Factory's names for models of this family: one may stand for another that fits better.
OWN_TEMPLATES = frozenset(
    {"qwen3", "qwen3_nothink", "qwen3_vl", "qwen3_vl_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_6"}
)

# Read from the official templates; `tests/test_families.py` computes them again.
KNOWN: dict[str, Family] = {
    "4591a3e6d574977af954af02866ef895": HYBRID,  # as published in April 2025
    "acb91f958cf196efa5d4f67f999fcad8": HYBRID,  # later, with a guard for contents that are not strings
    "888e6ba99cb9066d53569bffb52a6660": INSTRUCT_2507,
    "c7fd585ed2a76f062fd061d89319b951": THINKING_2507,
    "7679a7781ba83944e14aaa0c0b018cc3": VL,
    "ca8ac90a1570ab790c8190cba1a33ee9": VL_THINKING,
    "25031543d288ce7c4f8e02ca112fa948": CODER,  # of early August 2025
    "d1caf8ce674aa3718242fbf1be3b1330": CODER,  # later, with lists in JSON too
    "48872f4ed6ebc28548b62a76c938f5e5": QWEN3_5,
    "736b2c3edd32bc6c4b92b933ab51b723": QWEN3_5_SMALL,
    "4256619ce2e66257e11323af8d3cd450": QWEN3_6,
    "4cc73588536419114db5ec5ccd4edf18": QWEN3_8,
}


def normal_form(chat_template: str) -> str:
    """The tokens of a template, one a line."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    kept = []
    for _, kind, value in environment.lex(chat_template):
        if kind == "whitespace" or "comment" in kind:
            continue
        is_edge = kind.endswith(("_begin", "_end"))
        kept.append(f"{kind} {value.strip().strip('-') if is_edge else value!r}")
    return "\n".join(kept)


@lru_cache(maxsize=32)
def fingerprint(chat_template: str) -> str:
    """Hash of the normal form; of a text that is no template, one that nothing else has."""
    try:
        form = normal_form(chat_template)
    except jinja2.TemplateError:
        form = chat_template
    return hashlib.sha256(form.encode()).hexdigest()[:32]


def without_default(chat_template: str) -> str:
    """The model's own template, without the default that we put before it."""
    for header in _DEFAULTS.values():
        chat_template = chat_template.removeprefix(header)
    return chat_template


def with_default(chat_template: str, mode: Mode) -> str:
    """The template with `mode` as its default; one that has it already stays as it was published."""
    own = without_default(chat_template)
    family = recognise(own)
    if family is None or mode not in family.modes or family.modes[0] == mode:
        return own
    return _DEFAULTS[mode] + own


def default_mode(chat_template: str) -> Mode | None:
    """The mode of a prompt for which nobody asked for one; None for a template that is not known."""
    for mode, header in _DEFAULTS.items():
        if chat_template.startswith(header):
            return mode
    family = recognise(chat_template)
    return family.modes[0] if family else None


def recognise(chat_template: object) -> Family | None:
    """The family of a tokenizer's chat template, or None for one that is not known."""
    if not isinstance(chat_template, str):
        return None
    return KNOWN.get(fingerprint(without_default(chat_template)))
