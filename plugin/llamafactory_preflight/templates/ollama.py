"""Writes a family's chat template in Go's template language, for the Modelfile that Ollama reads.

Three things no such template can do: spell JSON with blanks, keep the order of a call's arguments, and trim a text.
All else is the official text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.templates import ollama_xml
from llamafactory_preflight.templates.families import EMPTY_THINK, IM_END, Family, Mode
from llamafactory_preflight.templates.ollama_xml import literal


_END = IM_END + "\n"
# Ollama's own parsers of calls in XML, with and without reasoning; without a name it looks for calls in JSON.
_XML_PARSER, _CODER_PARSER = "qwen3.5", "qwen3-coder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """What the model's chat template says in the system turn.

    Attributes:
        before_tools: What introduces the list of tools.
        after_tools: What follows it.
        instruction: What stands there in thinking mode whatever the user says; mostly nothing.
        default: The system text beside tools if the user gives none; mostly nothing.
        lists_in_json: Whether lists are written in JSON where the template writes XML, and not as Python prints them.
    """

    before_tools: str
    after_tools: str
    instruction: str = ""
    default: str = ""
    lists_in_json: bool = True


def modelfile(family: Family, *, mode: Mode, stops: Sequence[str], texts: Texts) -> str:
    """The whole Modelfile."""
    parser = _XML_PARSER if family.reasons else _CODER_PARSER
    lines = [
        "# made by llamafactory-preflight from the model's own chat template\n",
        f'FROM .\n\nTEMPLATE """{template(family, mode=mode, texts=texts)}"""\n',
        *([f"PARSER {parser}"] if family.calls_in_xml else []),
        *(f'PARAMETER stop "{stop}"' for stop in stops),
        "PARAMETER num_ctx 4096\n",
    ]
    return "\n".join(lines)


def template(family: Family, *, mode: Mode, texts: Texts) -> str:
    """The text after TEMPLATE: pieces without white space of their own, but for the think tags that Ollama seeks."""
    end_of_results = literal("\n" + _END if family.tools_in_xml else _END)
    messages = [
        '{{- $before := "" -}}',
        "{{- range $i, $_ := .Messages -}}",
        f'{{{{- if and (eq $before "tool") (ne .Role "tool") -}}}}{end_of_results}{{{{- end -}}}}',
        '{{- if eq .Role "user" -}}' + literal("<|im_start|>user\n") + "{{- .Content -}}" + literal(_END),
        '{{- else if eq .Role "assistant" -}}',
        literal("<|im_start|>assistant\n"),
        _thinking(family),
        "{{- .Content -}}",
        "{{- $said := .Content -}}",
        *_calls(family, texts),
        literal(_END),
        '{{- else if eq .Role "tool" -}}',
        f'{{{{- if ne $before "tool" -}}}}{literal("<|im_start|>user")}{{{{- end -}}}}',
        literal("\n<tool_response>\n") + "{{- .Content -}}" + literal("\n</tool_response>"),
        "{{- end -}}",
        "{{- $before = .Role -}}",
        "{{- end -}}",
        f'{{{{- if eq $before "tool" -}}}}{end_of_results}{{{{- end -}}}}',
    ]
    prompt = [
        '{{- if ne $before "assistant" -}}',
        literal("<|im_start|>assistant\n"),
        _prompt_end(family),
        "{{- end -}}",
    ]
    asked = "not (and .IsThinkSet (not .Think))" if mode == "think" else "and .IsThinkSet .Think"
    thinks = "{{- $thinks := " + asked + " -}}"
    return "".join([thinks, *_last_query(), *_system(family, texts), *messages, *prompt])


def _last_query() -> list[str]:
    """Go has no way to look back, so the last question is found before anything is written."""
    found = '{{- if eq .Role "user" -}}{{- $query = $i -}}{{- end -}}'
    return ["{{- $query := -1 -}}", "{{- range $i, $_ := .Messages -}}", found, "{{- end -}}"]


def _system(family: Family, texts: Texts) -> list[str]:
    """The first turn: a fixed instruction, then the user's system text and the tools in the family's order."""
    between, end = literal("\n\n"), "{{- end -}}"
    listed = f"{{{{- range .Tools -}}}}{literal(chr(10))}{{{{- . -}}}}{{{{- end -}}}}"
    if family.tools_in_xml:
        listed = "".join(ollama_xml.tools(lists_in_json=texts.lists_in_json))
    tools = literal(texts.before_tools) + listed + literal(texts.after_tools)
    both = f"{{{{- if and .Tools .System -}}}}{between}{end}"
    system = "{{- .System -}}"
    if texts.default:
        system = f"{{{{- if .System -}}}}{system}{{{{- else -}}}}{literal(texts.default)}{end}"
        both = f"{{{{- if .Tools -}}}}{between}{end}"
    tools = f"{{{{- if .Tools -}}}}{tools}{end}"
    tools_first = family.calls_in_xml and not family.tools_in_xml
    parts = [tools, both, system] if tools_first else [system, both, tools]
    instruction, some = "", "or .System .Tools"
    if texts.instruction:
        some = "or .System .Tools $thinks"
        more = f"{{{{- if or .System .Tools -}}}}{between}{end}"
        instruction = f"{{{{- if $thinks -}}}}{literal(texts.instruction)}{more}{end}"
    return [f"{{{{- if {some} -}}}}", literal("<|im_start|>system\n"), instruction, *parts, literal(_END), end]


def _calls(family: Family, texts: Texts) -> list[str]:
    if not family.calls_in_xml:
        return _json_calls()
    return ollama_xml.calls(in_python=family.tools_in_xml, lists_in_json=texts.lists_in_json)


def _json_calls() -> list[str]:
    return [
        "{{- range $number, $call := .ToolCalls -}}",
        f"{{{{- if or $number $said -}}}}{literal(chr(10))}{{{{- end -}}}}",
        literal('<tool_call>\n{"name": "') + "{{- .Function.Name -}}" + literal('", "arguments": '),
        "{{- .Function.Arguments -}}" + literal("}\n</tool_call>"),
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
    opens = literal("<think>\n")
    if family.modes == ("think",):
        return opens
    if len(family.modes) == 1:
        return ""
    thinking = opens if family.blocks_in_chain else ""
    return "{{- if $thinks -}}" + thinking + "{{- else -}}" + literal(EMPTY_THINK) + "{{- end -}}"
