"""Chat templates are known by what they say, however they are laid out, and by nothing less."""

from __future__ import annotations

import re

import pytest

from llamafactory_preflight.templates import families
from llamafactory_preflight.templates.families import Family
from template_matrix import LATER_CODER


EXPECTED = {
    "qwen3": families.HYBRID,
    "qwen3_instruct_2507": families.INSTRUCT_2507,
    "qwen3_thinking_2507": families.THINKING_2507,
    "qwen3_vl": families.VL,
    "qwen3_vl_thinking": families.VL_THINKING,
    "qwen3_coder": families.CODER,
    "qwen3_5_think": families.QWEN3_5,
    "qwen3_5_nothink": families.QWEN3_5_SMALL,
    "qwen3_6": families.QWEN3_6,
    "qwen3_8": families.QWEN3_8,
}
# What the revision of April 2025 says in other words: the guards for contents that are not strings came later.
FIRST_REVISION = (
    (" and message.content is string and not(", " and not("),
    (
        "    {%- if message.content is string %}\n        {%- set content = message.content %}\n"
        "    {%- else %}\n        {%- set content = '' %}\n    {%- endif %}\n",
        "",
    ),
    ("'\\n' + content + '<|im_end|>' + '\\n'", "'\\n' + message.content + '<|im_end|>' + '\\n'"),
    (
        "        {%- set reasoning_content = '' %}\n        {%- if message.reasoning_content is string %}",
        "        {%- set content = message.content %}\n        {%- set reasoning_content = '' %}\n"
        "        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}",
    ),
    (
        "            {%- if '</think>' in content %}\n"
        "                {%- set reasoning_content = content.split('</think>')[0]"
        ".rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n",
        "            {%- if '</think>' in message.content %}\n"
        "                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "                {%- set reasoning_content = message.content.split('</think>')[0]"
        ".rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n",
    ),
    ("{{- content }}", "{{- message.content }}"),
)


@pytest.mark.parametrize("name", EXPECTED)
def test_official_templates_are_known(chat_templates: dict[str, str], name: str) -> None:
    assert families.recognise(chat_templates[name]) is EXPECTED[name]


@pytest.mark.parametrize(("name", "changes"), [("qwen3", FIRST_REVISION), ("qwen3_coder", LATER_CODER)])
def test_other_revisions_are_known(
    chat_templates: dict[str, str], name: str, changes: tuple[tuple[str, str], ...]
) -> None:
    text = chat_templates[name]
    for ours, other in changes:
        assert ours in text
        text = text.replace(ours, other)
    assert text != chat_templates[name] and families.recognise(text) is EXPECTED[name]


def test_every_hash_is_of_a_template_in_the_tests(chat_templates: dict[str, str]) -> None:
    computed = {families.fingerprint(text) for text in chat_templates.values()}
    assert len(families.KNOWN.keys() - computed) == 2  # the other revisions, above


def test_layout_does_not_matter(chat_templates: dict[str, str]) -> None:
    text = re.sub(r"^ +", lambda found: "\t" + found.group(), chat_templates["qwen3"], flags=re.MULTILINE)
    assert text != chat_templates["qwen3"]
    assert families.recognise("{# a comment #}" + text + "\n") is families.HYBRID


@pytest.mark.parametrize("name", EXPECTED)
def test_a_changed_word_matters(chat_templates: dict[str, str], name: str) -> None:
    assert families.recognise(chat_templates[name].replace("<|im_start|>user", "<|im_start|>human")) is None


@pytest.mark.parametrize("text", [None, "", "{{ messages }}", "{% if", {"default": "x"}])
def test_what_is_no_template_of_the_family(text: object) -> None:
    assert families.recognise(text) is None


def test_another_default_is_put_before_and_taken_off(chat_templates: dict[str, str]) -> None:
    own = chat_templates["qwen3"]
    changed = families.with_default(own, "no_think")
    assert changed.endswith(own) and changed != own
    assert families.recognise(changed) is families.HYBRID
    assert (families.default_mode(own), families.default_mode(changed)) == ("think", "no_think")
    assert families.with_default(changed, "think") == own
    assert families.with_default(changed, "no_think") == changed


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "qwen3_thinking_2507", "qwen3_vl", "qwen3_coder"])
def test_one_mode_needs_no_default(chat_templates: dict[str, str], name: str) -> None:
    for mode in ("think", "no_think"):
        assert families.with_default(chat_templates[name], mode) == chat_templates[name]


def test_a_foreign_template_gets_no_default() -> None:
    assert families.with_default("{{ messages }}", "think") == "{{ messages }}"
    assert families.default_mode("{{ messages }}") is None


def test_the_first_mode_is_the_template_s_own(chat_templates: dict[str, str], tokenizer: object) -> None:
    def prompt(text: str, **options: bool) -> str:
        messages = [{"role": "user", "content": "x"}]
        return tokenizer.apply_chat_template(  # type: ignore[attr-defined,no-any-return]
            messages, chat_template=text, tokenize=False, add_generation_prompt=True, **options
        )

    for name, family in EXPECTED.items():
        text = chat_templates[name]
        modes = {mode: prompt(text, enable_thinking=mode == "think") for mode in family.modes}
        assert len(set(modes.values())) == len(family.modes), name
        assert prompt(text) == modes[family.modes[0]], name
        for mode in family.modes:
            changed = families.with_default(text, mode)
            assert prompt(changed) == modes[mode], name
            for other in family.modes:  # whoever asks for a mode still gets it
                assert prompt(changed, enable_thinking=other == "think") == modes[other], name


def test_names_differ() -> None:
    known: set[Family] = set(families.KNOWN.values())
    assert len({family.name for family in known}) == len(known) == len(EXPECTED)
