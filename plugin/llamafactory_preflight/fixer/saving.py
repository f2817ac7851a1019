"""What is saved serves as it was trained: the side file, end tokens, and the tokenizer's files as published."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.utils.hub import cached_file

from llamafactory_preflight.fixer import session
from llamafactory_preflight.templates import record
from llamafactory_preflight.templates.families import END_OF_TEXT, IM_END


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)


class SideFile(TrainerCallback):
    """Writes the record into every checkpoint and into the output folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The dataset is tokenized by now, so the tokenizer is no longer part of a fingerprint."""
        tokenizer = kwargs.get("processing_class")
        if session.CURRENT.record is not None and tokenizer is not None:
            _fail_open(lambda: keep_files(tokenizer))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint was written."""
        _write(state, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the model is saved a last time."""
        _write(state, args.output_dir)


def _write(state: Any, folder: str | Path) -> None:
    made = session.CURRENT.record
    if made is not None and state.is_world_process_zero:
        _fail_open(lambda: record.write(folder, made))


def _fail_open(step: Callable[[], None]) -> None:
    """A training or an export is never lost to us."""
    try:
        step()
    except Exception as error:
        session.say(f"a step of saving is left out ({type(error).__name__}: {error})")


def is_base(model: Any, tokenizer: Any) -> bool:
    """Whether a model was published without chat training: nothing of it names the end of a turn as an end."""
    end = tokenizer.convert_tokens_to_ids(IM_END)
    owners = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    return not any(end in _stops(owner) for owner in owners)


def fix_end_tokens(model: Any, tokenizer: Any) -> list[str]:
    """Lets a model stop where it was trained to; a base model's configuration still names the end of text.

    Returns:
        What was changed, one sentence each.
    """
    end, end_of_text = tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT])
    changes = []
    if is_base(model, tokenizer):
        changes.append(f"config.json: eos_token_id {model.config.get_text_config().eos_token_id} becomes {end}")
        for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
            if _stops(config):
                config.eos_token_id = end
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        given = generation.eos_token_id
        if not {end, end_of_text} <= _stops(generation):
            generation.eos_token_id = [end, end_of_text]
            changes.append(f"generation_config.json: eos_token_id {given} becomes {generation.eos_token_id}")
        if generation.pad_token_id is None:
            generation.pad_token_id = end_of_text
    return changes


def _stops(owner: Any) -> set[int]:
    """End tokens that a configuration names."""
    given = getattr(owner, "eos_token_id", None)
    return set(given) if isinstance(given, list) else {given} - {None}


def keep_files(tokenizer: Any) -> None:
    """Makes `save_pretrained` write the files of the model's own tokenizer, with our changes and no others."""
    originals = {name: found for name in TOKENIZER_FILES if (found := _original(name))}
    if (
        "tokenizer.json" in originals
        and "tokenizer_config.json" in originals
        and session.CURRENT.num_tokens == len(tokenizer)
    ):
        tokenizer.save_pretrained = functools.partial(_save, tokenizer, type(tokenizer).save_pretrained, originals)


def _original(name: str) -> str | None:
    found: str | None = cached_file(
        session.CURRENT.model,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _save(tokenizer: Any, saved_by: Any, originals: dict[str, str], folder: Any, *args: Any, **kwargs: Any) -> Any:
    written = saved_by(tokenizer, folder, *args, **kwargs)
    _fail_open(lambda: _restore(tokenizer, originals, Path(folder)))
    return written


def _restore(tokenizer: Any, originals: dict[str, str], target: Path) -> None:
    for name in TOKENIZER_FILES:
        if name in originals:
            data = Path(originals[name]).read_bytes()
            if not (target / name).exists() or (target / name).read_bytes() != data:
                (target / name).write_bytes(data)
        else:
            (target / name).unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name in originals:
            _update(target / name, tokenizer, template="chat_template.jinja" not in originals)
    if "chat_template.jinja" in originals:
        (target / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _update(path: Path, tokenizer: Any, *, template: bool) -> None:
    """Changes what differs, and adds no key but the template's."""
    given = json.loads(path.read_text(encoding="utf-8"))
    changed = dict(given)
    for key, token in (("eos_token", tokenizer.eos_token), ("pad_token", tokenizer.pad_token)):
        old = given.get(key)
        if isinstance(old, dict):
            changed[key] = old | {"content": token}
        elif key in given:
            changed[key] = token
    if template and path.name == "tokenizer_config.json":
        changed["chat_template"] = tokenizer.chat_template
    if changed != given:
        path.write_text(json.dumps(changed, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
