"""Saves the files of a tokenizer and a processor as they were published, with our changes and no others.

What transformers 5 writes, earlier versions cannot read: other names, other keys, a chat template in another place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from llamafactory_preflight.fixer import session
from llamafactory_preflight.templates import record


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
PROCESSOR_FILES = (
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json"),
)


def keep(tokenizer: Any, processor: Any) -> None:
    """Makes `save_pretrained` of both write the published files; a vocabulary that grew is left to transformers.

    In an export the side file is saved with the tokenizer, because a push to a hub saves to a folder of its own.
    """
    originals = {name: found for name in (*TOKENIZER_FILES, *PROCESSOR_FILES) if (found := _original(name))}
    restores = {"tokenizer.json", "tokenizer_config.json"} <= originals.keys()
    restores &= session.CURRENT.num_tokens == len(tokenizer)
    made = session.CURRENT.record if session.CURRENT.export_dir else None

    def complete(folder: Path) -> None:
        if restores:
            _restore_tokenizer(tokenizer, originals, folder)
        if made is not None:
            record.write(folder, made)

    _wrap(tokenizer, complete)
    if restores and processor is not None and "preprocessor_config.json" in originals:
        _wrap(processor, lambda folder: _restore_processor(tokenizer, processor, originals, folder))


def fail_open(step: Callable[[], None]) -> None:
    """A training or an export is never lost to us."""
    try:
        step()
    except Exception as error:
        session.say(f"a step of saving is left out ({type(error).__name__}: {error})")


def _wrap(owner: Any, restore: Callable[[Path], None]) -> None:
    saved_by = type(owner).save_pretrained

    @functools.wraps(saved_by)
    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        written = saved_by(owner, save_directory, *args, **kwargs)
        fail_open(lambda: restore(Path(save_directory)))
        return written

    owner.save_pretrained = save_pretrained


def _original(name: str) -> str | None:
    found: str | None = cached_file(
        session.CURRENT.model,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _restore_tokenizer(tokenizer: Any, originals: dict[str, str], target: Path) -> None:
    _copy(TOKENIZER_FILES, originals, target)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name in originals:
            _update(target / name, tokenizer, adds_template="chat_template.jinja" not in originals)
    if "chat_template.jinja" in originals:
        (target / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _restore_processor(tokenizer: Any, processor: Any, originals: dict[str, str], target: Path) -> None:
    _copy(PROCESSOR_FILES, originals, target)
    _restore_tokenizer(tokenizer, originals, target)
    if "chat_template.json" in originals:
        text = json.dumps({"chat_template": processor.chat_template}, ensure_ascii=False, indent=2)
        (target / "chat_template.json").write_text(text + "\n", encoding="utf-8")


def _copy(names: tuple[str, ...], originals: dict[str, str], target: Path) -> None:
    for name in names:
        if name in originals:
            data = Path(originals[name]).read_bytes()
            if not (target / name).exists() or (target / name).read_bytes() != data:
                (target / name).write_bytes(data)
        else:
            (target / name).unlink(missing_ok=True)


def _update(path: Path, tokenizer: Any, *, adds_template: bool) -> None:
    """Changes what differs, and adds no key but the template's where no file has it."""
    given = json.loads(path.read_text(encoding="utf-8"))
    changed = dict(given)
    for key, token in (("eos_token", tokenizer.eos_token), ("pad_token", tokenizer.pad_token)):
        old = given.get(key)
        if isinstance(old, dict):
            changed[key] = old | {"content": token}
        elif key in given:
            changed[key] = token
    if path.name == "tokenizer_config.json" and (adds_template or "chat_template" in given):
        changed["chat_template"] = tokenizer.chat_template
    if changed != given:
        path.write_text(json.dumps(changed, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
