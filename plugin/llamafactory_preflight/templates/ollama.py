"""Writes a family's chat template in Go's template language, for the Modelfile that Ollama reads.

Ollama prints tools and arguments as JSON without blanks, which no template can change; all else is the official text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llamafactory_preflight.templates.families import EMPTY_THINK, IM_END, Family, Mode


_JSON_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>",
)
_END = IM_END + "\n"


def modelfile(family: Family, *, mode: Mode, stops: Sequence[str]) -> str | None:
    """The whole Modelfile; None for a template that writes its calls in XML, which is left to LLaMA-Factory."""
    if family.blocks_in_chain:
        return None
    lines = [
        "# made by llamafactory-preflight from the model's own chat template\n",
        f'FROM .\n\nTEMPLATE """{template(family, mode=mode)}"""\n',
        *(f'PARAMETER stop "{stop}"' for stop in stops),
        "PARAMETER num_ctx 4096\n",
    ]
    return "\n".join(lines)


def template(family: Family, *, mode: Mode) -> str:
    """The text after TEMPLATE: pieces without white space of their own, but for the think tags that Ollama seeks."""
    head, foot = _JSON_TOOLS
    system = [
        "{{- if or .System .Tools -}}",
        _text("<|im_start|>system\n"),
        "{{- .System -}}",
        "{{- if .Tools -}}",
        f"{{{{- if .System -}}}}{_text(chr(10) * 2)}{{{{- end -}}}}",
        _text(head),
        f"{{{{- range .Tools -}}}}{_text(chr(10))}{{{{- . -}}}}{{{{- end -}}}}",
        _text(foot),
        "{{- end -}}",
        _text(_END),
        "{{- end -}}",
    ]
    answer = [
        _text("<|im_start|>assistant\n"),
        _thinking(family),
        "{{- .Content -}}",
        "{{- $said := .Content -}}",
        "{{- range $number, $call := .ToolCalls -}}",
        f"{{{{- if or $number $said -}}}}{_text(chr(10))}{{{{- end -}}}}",
        _text('<tool_call>\n{"name": "') + "{{- .Function.Name -}}" + _text('", "arguments": '),
        "{{- .Function.Arguments -}}" + _text("}\n</tool_call>"),
        "{{- end -}}",
        _text(_END),
    ]
    messages = [
        '{{- $before := "" -}}',
        "{{- range $i, $_ := .Messages -}}",
        f'{{{{- if and (eq $before "tool") (ne .Role "tool") -}}}}{_text(_END)}{{{{- end -}}}}',
        '{{- if eq .Role "user" -}}' + _text("<|im_start|>user\n") + "{{- .Content -}}" + _text(_END),
        '{{- else if eq .Role "assistant" -}}',
        *answer,
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
        _prompt_end(family, mode),
        "{{- end -}}",
    ]
    return "".join([*_last_query(), *system, *messages, *prompt])


def _text(text: str) -> str:
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}"


def _last_query() -> list[str]:
    """Go has no way to look back, so the last question is found before anything is written."""
    found = '{{- if eq .Role "user" -}}{{- $query = $i -}}{{- end -}}'
    return ["{{- $query := -1 -}}", "{{- range $i, $_ := .Messages -}}", found, "{{- end -}}"]


def _thinking(family: Family) -> str:
    if not family.reasons:
        return ""
    return "{{- if and .Thinking (gt $i $query) -}}<think>\n{{ .Thinking }}\n</think>\n\n{{ end -}}"


def _prompt_end(family: Family, mode: Mode) -> str:
    if family.modes == ("think",):
        return _text("<think>\n")
    if len(family.modes) == 1:
        return ""
    asked = "and .IsThinkSet (not .Think)" if mode == "think" else "not (and .IsThinkSet .Think)"
    return "{{- if " + asked + " -}}" + _text(EMPTY_THINK) + "{{- end -}}"
