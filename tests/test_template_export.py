"""A real training on a CPU, its export, and plain transformers, which knows nothing of the plugin."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


QUESTION = [{"role": "user", "content": "hi"}]
PLAIN = [{"instruction": f"q{n}", "input": "", "output": f"a{n}"} for n in range(8)]
REASONED = [row | {"output": f"<think>r</think>{row['output']}"} for row in PLAIN]


@pytest.fixture
def train(tmp_path: Path, tiny_model: Path, run: Callable[..., Any]) -> Callable[..., Any]:
    """Trains two steps of LoRA with checkpoints, and exports: `train(records, model=..., **arguments)`."""

    def trained(
        records: list[dict[str, str]],
        *,
        model: Path = tiny_model,
        hub: str = "",
        **arguments: Any,
    ) -> tuple[str, str]:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        (data / "some.json").write_text(json.dumps(records))
        (data / "dataset_info.json").write_text(json.dumps({"some": {"file_name": "some.json"}}))
        common = {"model_name_or_path": str(model), "template": "qwen3", "trust_remote_code": False}
        training = {
            **common,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": 4,
            "dataset": "some",
            "dataset_dir": str(data),
            "cutoff_len": 64,
            "output_dir": str(tmp_path / "adapter"),
            "max_steps": 2,
            "save_steps": 1,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "dataloader_pin_memory": False,
            **arguments,
        }
        export = {**common, "adapter_name_or_path": str(tmp_path / "adapter"), "export_dir": str(tmp_path / "merged")}
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        if hub:
            export |= {"export_hub_model_id": "someone/merged", "hf_hub_token": "none"}
            environment |= {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        said = []
        for verb, given in (("train", training), ("export", export)):
            file = tmp_path / f"{verb}.json.yaml"
            file.write_text(json.dumps(given))
            done = run(["llamafactory-cli", verb, file], cwd=tmp_path, env=environment, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
            said.append(done.stdout + done.stderr)
        return said[0], said[1]

    return trained


def prompt(folder: Path, **options: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: str = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **options)
    return text


THINK = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NO_THINK = THINK + "<think>\n\n</think>\n\n"


OLDER = (
    ("transformers==4.57.6", "4c9e9de11333ddfe5114bc872c9f370509198acf0b87a832a0ab9458e2bd0550"),
    ("huggingface-hub==0.36.2", "48f0c8eac16145dfce371e9d2d7772854a4f591bcb56c9cf548accf531d54270"),
)
# What a server does with a folder: prompts in each mode, their ids, and where generation stops.
SERVE = """
import json, sys
import transformers
from transformers import AutoTokenizer, GenerationConfig
seen = []
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True, **options
        )
        seen.append([text, tokenizer.encode(text), tokenizer.eos_token_id, tokenizer.pad_token_id])
print(json.dumps([transformers.__version__, type(tokenizer).__name__, seen]))
"""


@pytest.fixture(scope="module")
def older_transformers(
    wheel: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Runs `SERVE` with the last transformers 4, on top of this environment: `older_transformers(run, folders)`."""
    packages = tmp_path_factory.mktemp("older")
    for pin in OLDER:
        with zipfile.ZipFile(wheel(*pin)) as archive:
            archive.extractall(packages)

    def served(run: Callable[..., Any], folders: list[Path]) -> list[Any]:
        results = []
        for path in (str(packages), ""):
            environment = {"PYTHONPATH": path, "USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error"}
            done = run([sys.executable, "-c", SERVE, *folders], env=environment)
            assert done.returncode == 0, done.stderr[-3000:]
            results.append(json.loads(done.stdout.splitlines()[-1]))
        return results

    return served


@pytest.mark.parametrize(("records", "mode", "text"), [(PLAIN, "no_think", NO_THINK), (REASONED, "think", THINK)])
def test_what_is_saved_answers_as_it_was_trained(
    train: Callable[..., Any],
    tmp_path: Path,
    tiny_model: Path,
    run: Callable[..., Any],
    older_transformers: Callable[..., Any],
    records: list[dict[str, str]],
    mode: str,
    text: str,
) -> None:
    said, _ = train(records)
    assert "repaired for Qwen3" in said
    for folder in ("adapter", "adapter/checkpoint-1", "adapter/checkpoint-2", "merged"):
        assert prompt(tmp_path / folder) == text, folder
        assert prompt(tmp_path / folder, enable_thinking=True) == THINK, folder
        assert prompt(tmp_path / folder, enable_thinking=False) == NO_THINK, folder
        record = json.loads((tmp_path / folder / "llamafactory_preflight_template.json").read_text())
        assert (record["mode"], record["num_think"] + record["num_no_think"]) == (mode, 8), folder
        _same_files(tiny_model, tmp_path / folder)
    folders = [tmp_path / folder for folder in ("adapter", "adapter/checkpoint-1", "merged")]
    (version, kind, older), (_, _, now) = older_transformers(run, folders)
    assert version.startswith("4.57.") and kind == "Qwen2TokenizerFast"
    assert older == now
    assert [seen[0] for seen in older] == [text, THINK, NO_THINK] * len(folders)


def _same_files(original: Path, saved: Path) -> None:
    """The tokenizer's files are those of the original, and so are their keys; only the chat template may differ."""
    names = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"}
    names |= {"special_tokens_map.json", "added_tokens.json"}
    assert {name for name in names if (saved / name).exists()} == {
        name for name in names if (original / name).exists()
    }
    assert (saved / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (original, saved))
    assert before.keys() == after.keys()
    assert {key for key in before if before[key] != after[key]} <= {"chat_template"}


def test_a_base_model_stops(train: Callable[..., Any], tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    base = shutil.copytree(tiny_model, tmp_path / "base")
    for name, key, value in (
        ("config.json", "eos_token_id", 151643),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        changed = json.loads((base / name).read_text()) | {key: value}
        (base / name).write_text(json.dumps(changed))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 151643, "max_new_tokens": 20}))
    said, exported = train(PLAIN, model=base)
    assert "was never trained" in said
    assert "config.json: eos_token_id 151643 becomes 151645" in exported
    merged = tmp_path / "merged"
    assert AutoTokenizer.from_pretrained(merged).eos_token == "<|im_end|>"
    assert AutoConfig.from_pretrained(merged).eos_token_id == 151645
    generation = GenerationConfig.from_pretrained(merged)
    assert (generation.eos_token_id, generation.pad_token_id) == ([151645, 151643], 151643)
    assert generation.max_new_tokens == 20


def test_off_leaves_no_trace(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    said, _ = train(PLAIN)
    assert "repaired" in said
    file = tmp_path / "train.json.yaml"
    given = json.loads(file.read_text()) | {"output_dir": str(tmp_path / "plain"), "max_steps": 1}
    file.write_text(json.dumps(given))
    off = {"CUDA_VISIBLE_DEVICES": "", "LLAMAFACTORY_TEMPLATE": "off"}
    done = run(["llamafactory-cli", "train", file], cwd=tmp_path, env=off, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "repaired" not in done.stdout + done.stderr
    assert not (tmp_path / "plain" / "llamafactory_preflight_template.json").exists()
    assert prompt(tmp_path / "plain") == THINK


def test_a_cache_of_other_rules_is_not_used(
    train: Callable[..., Any], tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dataset cache, first without the plugin's repair, then with it, then with other switches."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train(PLAIN, max_steps=1)
    file = tmp_path / "train.json.yaml"
    given = json.loads(file.read_text())
    blocks = []
    for number, switches in enumerate(
        (
            {"LLAMAFACTORY_TEMPLATE": "off"},
            {},
            {"LLAMAFACTORY_TEMPLATE_EMPTY_THINK": "train"},
            {"LLAMAFACTORY_TEMPLATE": "off"},
        )
    ):
        file.write_text(json.dumps(given | {"output_dir": str(tmp_path / str(number)), "save_strategy": "no"}))
        environment = {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(tmp_path / "cache"), **switches}
        done = run(["llamafactory-cli", "train", file], cwd=tmp_path, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        blocks.append("labels:\n<think>\n\n</think>\n\na" in done.stdout)
    assert blocks == [True, False, True, True]


def test_chat_and_a_second_stage_read_the_side_file(
    train: Callable[..., Any], tmp_path: Path, run: Callable[..., Any], tiny_model: Path
) -> None:
    train(PLAIN)
    code = """
import json, sys
from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.hparams import get_infer_args
from llamafactory.model import load_tokenizer
for given in json.loads(sys.argv[1]):
    model_args, data_args, *_ = get_infer_args(given)
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    print("PROMPT", json.dumps(tokenizer.decode(template.encode_oneturn(tokenizer, messages)[0])))
"""
    model = {"model_name_or_path": str(tiny_model), "template": "qwen3"}
    adapter = model | {"adapter_name_or_path": str(tmp_path / "adapter")}
    merged = {"model_name_or_path": str(tmp_path / "merged"), "template": "qwen3"}
    runs = [model, adapter, merged, adapter | {"enable_thinking": True}, merged | {"enable_thinking": True}]
    done = run([sys.executable, "-c", code, json.dumps(runs)], cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = [
        json.loads(line.removeprefix("PROMPT ")) for line in done.stdout.splitlines() if line.startswith("PROMPT")
    ]
    assert prompts == [THINK, NO_THINK, NO_THINK, THINK, THINK]


def test_samples_are_shown(tmp_path: Path, tiny_model: Path, run: Callable[..., Any], root: Path) -> None:
    command = ["llamafactory-cli", "template", root / "presets/cpu_smoke.yaml", f"model_name_or_path={tiny_model}"]
    command += [f"dataset_dir={root / 'presets/data'}", "--sample", "2", "--html", tmp_path / "page.html"]
    done = run(command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("--- sample ") == 2
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\n[[" in done.stdout
    assert done.stdout.count("<|im_end|>]]") == 2
    assert "100 samples of" in done.stdout and "% of the tokens are trained" in done.stdout
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<span class="loss special">&lt;|im_end|&gt;</span>') == 2
    assert "http" not in page and "<script" not in page
    assert not (tmp_path / "saves").exists()
