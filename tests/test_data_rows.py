"""What is said of the rows of a data set holds for the real LLaMA-Factory, and it reads the entry that is proposed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.findings import data_rows
from llamafactory_preflight.run import RunDescription


RUN = RunDescription(model_name_or_path="m", do_train=True)
ALPACA = {"instruction": "Say it.", "input": "Well?", "output": "It."}
SHAREGPT = {"conversations": [{"from": "human", "value": "Well?"}, {"from": "gpt", "value": "It."}]}
CHAT = {"messages": [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "It."}]}
PAIR = {"instruction": "Say it.", "input": "", "chosen": "It.", "rejected": "Not it."}
CHAT_ENTRY = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
ROLES = {"role_tag": "role", "content_tag": "content"}
Case = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]
# Rows, what stands in dataset_info.json beside `file_name`, and arguments; with a part of what is said.
FAULTY: dict[str, tuple[Case, str]] = {
    "other columns": (([{"q": "a", "r": "b"}], {}, {}), "has no column `instruction`"),
    "columns that tell": (([{"prompt": "a", "response": "b"}], {}, {}), "has no column `instruction`"),
    "no input": (([{"instruction": "a", "output": "b"}], {}, {}), "has no column `input`"),
    "no answers": (([{"instruction": "a", "input": "b"}], {}, {}), "has no column `output`"),
    "a named column": (([ALPACA], {"columns": {"prompt": "instruction", "system": "sys"}}, {}), "no column `sys`"),
    "conversations as alpaca": (([SHAREGPT], {}, {}), "has no column `instruction`"),
    "messages as alpaca": (([CHAT], {}, {}), "has no column `instruction`"),
    "another name of messages": (([CHAT], {"formatting": "sharegpt"}, {}), "has no column `conversations`"),
    "no tags": (([CHAT], CHAT_ENTRY, {}), "have no `from`"),
    "no tags in openai": (([CHAT], CHAT_ENTRY | {"formatting": "openai"}, {}), "have no `from`"),
    "half of the tags": (([CHAT], CHAT_ENTRY | {"tags": ROLES}, {}), "names no `user_tag`"),
    "tags of another kind": (([SHAREGPT], {"formatting": "sharegpt", "tags": {"role_tag": "from", "content_tag":
                             "value", "user_tag": "user"}}, {}), "is from `user`"),
    "texts": (([{"text": "Once upon a time. " * 200}], {}, {"stage": "pt"}), "has no column `instruction`"),
    "no marks at all": (([ALPACA], {}, {"stage": "kto"}), "marks no answers as good or bad"),
    "no rows": (([], {}, {}), "holds no rows"),
    "no pairs": (([ALPACA], {}, {"stage": "dpo"}), "is no data set of preferences, which `stage: dpo`"),
    "pairs": (([PAIR], {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected":
              "rejected"}}, {}), "is a data set of preferences, which `stage: sft` does not take"),
    "no marks": (([ALPACA], {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "label"}},
                 {"stage": "kto"}), "has no column `label`"),
}  # fmt: skip
GOOD: dict[str, Case] = {
    "alpaca": ([ALPACA], {}, {}),
    "a column in one row only": ([{"instruction": "a", "output": "b"}, ALPACA], {}, {}),
    "columns": ([{"q": "a", "r": "b"}], {"columns": {"prompt": "q", "response": "r"}}, {}),
    "sharegpt": ([SHAREGPT], {"formatting": "sharegpt"}, {}),
    "a system prompt and a lone question": (
        [{"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT["conversations"]]},
         {"conversations": SHAREGPT["conversations"][:1]}], {"formatting": "sharegpt"}, {}),
    "messages": ([CHAT], CHAT_ENTRY | {"tags": ROLES | {"user_tag": "user", "assistant_tag": "assistant"}}, {}),
}  # fmt: skip
# Reads each data set as a training does before it loads the weights, in one process and without the plugin's checks.
READING = """
import json, sys
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from omegaconf import OmegaConf
preset, changes, cases = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.argv = sys.argv[:1]
outcomes, tokenizer = {}, None
for name, more in cases.items():
    try:
        given = OmegaConf.to_container(OmegaConf.load(preset)) | changes | more | {"dataset": name}
        model, data, training, finetuning, _ = get_train_args(given)
        tokenizer = tokenizer or load_tokenizer(model)
        template = get_template_and_fix_tokenizer(tokenizer["tokenizer"], data)
        stage = {"dpo": "rm"}.get(finetuning.stage, finetuning.stage)
        assert len(get_dataset(template, model, data, training, stage=stage, **tokenizer)["train_dataset"])
        outcomes[name] = "read"
    except Exception as error:
        outcomes[name] = type(error).__name__
print(json.dumps(outcomes))
"""


def write(folder: Path, cases: dict[str, Case], suffix: str = ".json") -> None:
    info = {}
    for name, (rows, entry, _) in cases.items():
        lines = "\n".join(map(json.dumps, rows))
        (folder / f"{name}{suffix}").write_text(json.dumps(rows) if suffix == ".json" else lines)
        info[name] = {"file_name": f"{name}{suffix}", **entry}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def said(folder: Path, name: str, more: dict[str, Any]) -> list[str]:
    run = replace(RUN, dataset=(name,), dataset_dir=str(folder), **more)
    return [finding.message for finding in data_rows.data_rows(run, trains=True)]


@pytest.fixture
def outcomes(run: Callable[..., Any], root: Path, tmp_path: Path, tiny_model: Path) -> Callable[..., dict[str, str]]:
    def outcomes(cases: dict[str, Case], **env: str) -> dict[str, str]:
        changes = {
            "model_name_or_path": str(tiny_model), "dataset_dir": str(tmp_path), "plot_loss": False,
            "output_dir": str(tmp_path / "out"), "overwrite_cache": True,
        }  # fmt: skip
        given = json.dumps({name: more for name, (_, _, more) in cases.items()})
        command = ["python", "-c", READING, root / "presets/cpu_smoke.yaml", json.dumps(changes), given]
        env |= {"CUDA_VISIBLE_DEVICES": "", "LLAMAFACTORY_PREFLIGHT": "off", "HF_DATASETS_CACHE": str(tmp_path / "c")}
        done = run(command, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    return outcomes


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_what_is_said(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, {name: case for name, (case, _) in FAULTY.items()} | GOOD, suffix)
    for name, ((_, _, more), part) in FAULTY.items():
        (message,) = said(tmp_path, name, more)
        assert part in message and f"`{name}`" in message, message
    assert {name: said(tmp_path, name, GOOD[name][2]) for name in GOOD} == {name: [] for name in GOOD}


@pytest.mark.parametrize("templates", ["fix", "off"])
def test_no_training_gets_past_what_is_said(outcomes: Any, tmp_path: Path, templates: str) -> None:
    cases = {name: case for name, (case, _) in FAULTY.items()} | GOOD
    if templates == "off":  # the repair is about conversations
        cases = {name: case for name, case in cases.items() if "formatting" in case[1]}
    write(tmp_path, cases)
    found = outcomes(cases, LLAMAFACTORY_TEMPLATE=templates)
    assert {name for name, outcome in found.items() if outcome == "read"} == cases.keys() & GOOD.keys(), found


def test_the_entry_that_is_proposed_is_read(outcomes: Any, tmp_path: Path) -> None:
    write(tmp_path, {name: case for name, (case, _) in FAULTY.items()})
    entries: dict[str, Any] = {}
    for name, ((_, _, more), _) in FAULTY.items():
        _, proposed, entry = said(tmp_path, name, more)[0].partition(" that fits: ")
        if proposed:
            entries |= json.loads("{" + entry + "}")
    assert entries.keys() >= {
        "columns that tell",
        "no input",
        "messages as alpaca",
        "no tags",
        "half of the tags",
        "texts",
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    cases = {name: FAULTY[name][0] for name in entries}
    assert all(said(tmp_path, name, more) == [] for name, (_, _, more) in cases.items())
    found = outcomes(cases)
    assert set(found.values()) == {"read"}, found


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, {"rows": ([{"q": "a"}], {}, {})})
    assert len(said(tmp_path, "rows", {})) == 1
    write(tmp_path, {"rows": ([ALPACA], {}, {})})
    assert said(tmp_path, "rows", {}) == []


@pytest.mark.parametrize("text", ["[1, 2]", '[{"a":', "{", '"text"', "\udcff"])
def test_what_cannot_be_told_is_not_said(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"rows": ([], {}, {})})
    assert len(said(tmp_path, "rows", {})) == 1
    (tmp_path / "rows.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert said(tmp_path, "rows", {}) == []


def test_data_that_is_tokenized_already_is_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path, {"rows": ([], {}, {})})
    assert len(said(tmp_path, "rows", {"tokenized_path": str(tmp_path / "will be")})) == 1
    assert said(tmp_path, "rows", {"tokenized_path": str(tmp_path)}) == []
