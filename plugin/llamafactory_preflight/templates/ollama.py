"""Writes a family's chat template in Go's template language, for the Modelfile that Ollama reads.

Three things no such template can do: spell JSON with blanks, keep the order of a call's arguments, and trim a text.
All else is the official text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.templates.families import EMPTY_THINK, IM_END, Family, Mode


_END = IM_END + "\n"
# Ollama's own parser of calls in XML; without a name it looks for calls in JSON.
_XML_PARSER = "qwen3.5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """What the model's chat template says in the system turn.

    Attributes:
        before_tools: What introduces the list of tools.
        after_tools: What follows it.
        instruction: What stands there in thinking mode whatever the user says; mostly nothing.
    """

    before_tools: str
    after_tools: str
    instruction: str = ""


def modelfile(family: Family, *, mode: Mode, stops: Sequence[str], texts: Texts) -> str | None:
    """The whole Modelfile; None for Qwen3-Coder, whose list of tools cannot be written in Go."""
    if family.calls_in_xml and not family.reasons:
        return None
    lines = [
        "# made by llamafactory-preflight from the model's own chat template\n",
        f'FROM .\n\nTEMPLATE """{template(family, mode=mode, texts=texts)}"""\n',
        *([f"PARSER {_XML_PARSER}"] if family.calls_in_xml else []),
        *(f'PARAMETER stop "{stop}"' for stop in stops),
        "PARAMETER num_ctx 4096\n",
    ]
    return "\n".join(lines)


def template(family: Family, *, mode: Mode, texts: Texts) -> str:
    """The text after TEMPLATE: pieces without white space of their own, but for the think tags that Ollama seeks."""
    messages = [
        '{{- $before := "" -}}',
        "{{- range $i, $_ := .Messages -}}",
        f'{{{{- if and (eq $before "tool") (ne .Role "tool") -}}}}{_text(_END)}{{{{- end -}}}}',
        '{{- if eq .Role "user" -}}' + _text("<|im_start|>user\n") + "{{- .Content -}}" + _text(_END),
        '{{- else if eq .Role "assistant" -}}',
        _text("<|im_start|>assistant\n"),
        _thinking(family),
        "{{- .Content -}}",
        "{{- $said := .Content -}}",
        *(_xml_calls() if family.calls_in_xml else _json_calls()),
        _text(_END),
        '{{- else if eq .Role "tool" -}}',
        f'{{{{- if ne $before "tool" -}}}}{_text("<|im_start|>user")}{{{{- end -}}}}',
        _text("\n<tool_response>\n") + "{{- .Content -}}" + _text("\n</tool_response>"),
        "{{- end -}}",
        "{{- $before = .Role -}}",
        "{{- end -}}",
        f'{{{{- if eq $before "tool" -}}}}{_text(_END)}{{{{- end -}}}}',
    ]
    prompt = [
        '{{- if ne $before "assistant" -}}',
        _text("<|im_start|>assistant\n"),
        _prompt_end(family),
        "{{- end -}}",
    ]
    asked = "not (and .IsThinkSet (not .Think))" if mode == "think" else "and .IsThinkSet .Think"
    thinks = "{{- $thinks := " + asked + " -}}"
    return "".join([thinks, *_last_query(), *_system(family, texts), *messages, *prompt])


def _text(text: str) -> str:
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}"


def _last_query() -> list[str]:
    """Go has no way to look back, so the last question is found before anything is written."""
    found = '{{- if eq .Role "user" -}}{{- $query = $i -}}{{- end -}}'
    return ["{{- $query := -1 -}}", "{{- range $i, $_ := .Messages -}}", found, "{{- end -}}"]


def _system(family: Family, texts: Texts) -> list[str]:
    """The first turn: a fixed instruction, then the user's system text and the tools in the family's order."""
    between, end = _text("\n\n"), "{{- end -}}"
    listed = f"{{{{- range .Tools -}}}}{_text(chr(10))}{{{{- . -}}}}{{{{- end -}}}}"
    tools = _text(texts.before_tools) + listed + _text(texts.after_tools)
    both = f"{{{{- if and .Tools .System -}}}}{between}{end}"
    system = "{{- .System -}}"
    tools = f"{{{{- if .Tools -}}}}{tools}{end}"
    parts = [tools, both, system] if family.calls_in_xml else [system, both, tools]
    instruction, some = "", "or .System .Tools"
    if texts.instruction:
        some = "or .System .Tools $thinks"
        more = f"{{{{- if or .System .Tools -}}}}{between}{end}"
        instruction = f"{{{{- if $thinks -}}}}{_text(texts.instruction)}{more}{end}"
    return [f"{{{{- if {some} -}}}}", _text("<|im_start|>system\n"), instruction, *parts, _text(_END), end]


def _json_calls() -> list[str]:
    return [
        "{{- range $number, $call := .ToolCalls -}}",
        f"{{{{- if or $number $said -}}}}{_text(chr(10))}{{{{- end -}}}}",
        _text('<tool_call>\n{"name": "') + "{{- .Function.Name -}}" + _text('", "arguments": '),
        "{{- .Function.Arguments -}}" + _text("}\n</tool_call>"),
        "{{- end -}}",
    ]


def _xml_calls() -> list[str]:
    value = '{{- if eq (printf "%T" $value) "string" -}}{{- $value -}}{{- else -}}{{- json $value -}}{{- end -}}'
    return [
        "{{- range $number, $call := .ToolCalls -}}",
        f"{{{{- if $number -}}}}{_text(chr(10))}{{{{- else if $said -}}}}{_text(chr(10) * 2)}{{{{- end -}}}}",
        _text("<tool_call>\n<function=") + "{{- .Function.Name -}}" + _text(">\n"),
        "{{- range $name, $value := .Function.Arguments -}}",
        _text("<parameter=") + "{{- $name -}}" + _text(">\n") + value + _text("\n</parameter>\n"),
        "{{- end -}}",
        _text("</function>\n</tool_call>"),
        "{{- end -}}",
    ]


def _thinking(family: Family) -> str:
    if not family.reasons:
        return ""
    block = "<think>\n{{ .Thinking }}\n</think>\n\n"
    if family.keeps_history:
        return f"{{{{- if true -}}}}{block}{{{{ end -}}}}"
    shown = "gt $i $query" if family.blocks_in_chain else "and .Thinking (gt $i $query)"
    return f"{{{{- if {shown} -}}}}{block}{{{{ end -}}}}"


def _prompt_end(family: Family) -> str:
    opens = _text("<think>\n")
    if family.modes == ("think",):
        return opens
    if len(family.modes) == 1:
        return ""
    thinking = opens if family.blocks_in_chain else ""
    return "{{- if $thinks -}}" + thinking + "{{- else -}}" + _text(EMPTY_THINK) + "{{- end -}}"
