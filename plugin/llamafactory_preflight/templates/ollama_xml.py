"""What Qwen3-Coder and Qwen3.5 write in XML, in Go's template language: calls, and Qwen3-Coder's list of tools.

Objects are in Go's JSON, without blanks; a list that Python prints is exact as long as its items are not lists or
objects and its texts have no quotation marks. What Ollama does not hand to a template cannot be listed.
"""

from __future__ import annotations

import json


END = "{{- end -}}"


def literal(text: str) -> str:
    """A piece of a template that writes a text as it is."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}"


def calls(*, in_python: bool, lists_in_json: bool) -> list[str]:
    """The calls of one answer; what it says stands in `$said`.

    Args:
        in_python: Whether a value is written as Python prints it, and not in JSON.
        lists_in_json: Whether lists are in JSON even then.
    """
    value = _value("$value", lists_in_json=lists_in_json) if in_python else _spelled("$value", "{{- json $value -}}")
    return [
        "{{- range $number, $call := .ToolCalls -}}",
        f"{{{{- if $number -}}}}{literal(chr(10))}{{{{- else if $said -}}}}{literal(chr(10) * 2)}{END}",
        literal("<tool_call>\n<function=") + "{{- .Function.Name -}}" + literal(">\n"),
        "{{- range $name, $value := .Function.Arguments -}}",
        literal("<parameter=") + "{{- $name -}}" + literal(">\n") + value + literal("\n</parameter>\n"),
        END,
        literal("</function>\n</tool_call>"),
        END,
    ]


def tools(*, lists_in_json: bool) -> list[str]:
    """The list of tools; of a schema only what Ollama keeps: types, descriptions, choices, items and requirements."""

    def element(name: str, field: str, value: str) -> str:
        opening, closing = literal(f"\n<{name}>"), literal(f"</{name}>")
        return f"{{{{- with {field} -}}}}{opening}{value}{closing}{END}"

    def items(start: str) -> str:
        return _list(start, lists_in_json=lists_in_json)

    several = "{{- if gt (len .) 1 -}}" + _list(".", lists_in_json=False) + "{{- else -}}{{- index . 0 -}}" + END
    said = "{{- . -}}"
    return [
        "{{- range .Tools -}}",
        literal("\n<function>\n<name>") + "{{- .Function.Name -}}" + literal("</name>"),
        element("description", ".Function.Description", said) + literal("\n<parameters>"),
        "{{- range $name, $field := .Function.Parameters.Properties -}}",
        literal("\n<parameter>\n<name>") + "{{- $name -}}" + literal("</name>"),
        element("type", "$field.Type", several) + element("description", "$field.Description", said),
        element("anyOf", "$field.AnyOf", "{{- json . -}}") + element("items", "$field.Items", "{{- json . -}}"),
        element("enum", "$field.Enum", items(".")) + literal("\n</parameter>"),
        END,
        element("$defs", ".Function.Parameters.Defs", "{{- json . -}}"),
        element("required", ".Function.Parameters.Required", items(".")) + literal("\n</parameters>\n</function>"),
        END,
    ]


def _value(name: str, *, lists_in_json: bool) -> str:
    """A value as Qwen3-Coder writes it: a text as it is, an object in JSON, the rest as Python prints it."""
    is_list = f'{{{{- if eq (slice (printf "%T" {name}) 0 1) "[" -}}}}'
    written = is_list + _list(name, lists_in_json=lists_in_json) + "{{- else -}}" + _scalar(name) + END
    return _spelled(name, written)


def _spelled(name: str, otherwise: str) -> str:
    return f'{{{{- if eq (printf "%T" {name}) "string" -}}}}{{{{- {name} -}}}}{{{{- else -}}}}{otherwise}{END}'


def _scalar(name: str) -> str:
    """What is neither a text nor a list."""
    kind = f'(printf "%T" {name})'
    return (
        f'{{{{- if eq {kind} "bool" -}}}}{{{{- if {name} -}}}}True{{{{- else -}}}}False{END}'
        f'{{{{- else if eq {kind} "<nil>" -}}}}None{{{{- else -}}}}{{{{- json {name} -}}}}{END}'
    )


def _list(name: str, *, lists_in_json: bool) -> str:
    """Go's own JSON has no blanks, and only its items are written with it."""
    item = "{{- json $item -}}"
    if not lists_in_json:
        quoted = literal("'") + "{{- $item -}}" + literal("'")
        item = f'{{{{- if eq (printf "%T" $item) "string" -}}}}{quoted}{{{{- else -}}}}{_scalar("$item")}{END}'
    comma = "{{- if $n -}}" + literal(", ") + END
    return literal("[") + f"{{{{- range $n, $item := {name} -}}}}{comma}{item}{END}" + literal("]")
