"""What a tokenizer and a processor save are the published files, wherever their chat template stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight.fixer import session
from llamafactory_preflight.templates import families


IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
}
VIDEOS = IMAGES | {"video_processor_type": "Qwen3VLVideoProcessor"}


def published(folder: Path, tiny_model: Path, template: str, places: set[str]) -> Path:
    """A tokenizer's files as a hub has them, with the chat template in `places` and nowhere else."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    config = json.loads((tiny_model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    if "tokenizer_config.json" in places:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if "chat_template.jinja" in places:
        (folder / "chat_template.jinja").write_text(template)
    if "chat_template.json" in places:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return folder


@pytest.mark.parametrize(
    "places",
    [
        {"tokenizer_config.json"},
        {"chat_template.jinja"},
        {"tokenizer_config.json", "chat_template.jinja"},
        {"tokenizer_config.json", "chat_template.json"},
    ],
    ids=" and ".join,
)
def test_the_files_are_those_that_were_published(
    tmp_path: Path,
    tiny_model: Path,
    chat_templates: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    places: set[str],
) -> None:
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.data.template import TEMPLATES
    from llamafactory.hparams import DataArguments
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    if "qwen3_5" not in TEMPLATES:
        pytest.skip("this LLaMA-Factory has no template qwen3_5")
    own = chat_templates["qwen3_5_think"]
    original = published(tmp_path / "original", tiny_model, own, places)
    tokenizer = AutoTokenizer.from_pretrained(original)
    processor = None
    if "chat_template.json" in places:
        processor = Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(),
            chat_template=own,
        )
    exporting = session.Session(model=str(original), export_dir="x", processor=processor, num_tokens=len(tokenizer))
    monkeypatch.setattr(session, "CURRENT", exporting)
    get_template_and_fix_tokenizer(tokenizer, DataArguments(template="qwen3_5_nothink"))
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    if processor is not None:
        processor.save_pretrained(saved)
    changed = families.with_default(own, "no_think")
    assert {file.name for file in saved.iterdir()} == {file.name for file in original.iterdir()}
    for file in original.iterdir():
        if file.suffix == ".json" and file.name in places:
            before, after = (json.loads((folder / file.name).read_text()) for folder in (original, saved))
            assert before | {"chat_template": changed} == after
        elif file.name in places:
            assert (saved / file.name).read_text() == changed
        else:
            assert (saved / file.name).read_bytes() == file.read_bytes(), file.name
    assert AutoTokenizer.from_pretrained(saved).chat_template == changed


def test_a_vocabulary_that_grew_is_left_to_transformers(
    tmp_path: Path, tiny_model: Path, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from llamafactory_preflight.fixer import files

    original = published(tmp_path / "original", tiny_model, chat_templates["qwen3"], {"tokenizer_config.json"})
    tokenizer: Any = AutoTokenizer.from_pretrained(original)
    monkeypatch.setattr(session, "CURRENT", session.Session(model=str(original), num_tokens=len(tokenizer)))
    tokenizer.add_tokens(["<mine>"])
    files.keep(tokenizer, None)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert "<mine>" in AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab()
