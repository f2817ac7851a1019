"""What is saved serves as it was trained: the side file, and end tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from llamafactory_preflight.fixer import files, session
from llamafactory_preflight.fixer.files import fail_open
from llamafactory_preflight.templates import record
from llamafactory_preflight.templates.families import END_OF_TEXT, IM_END


class SideFile(TrainerCallback):
    """Writes the record into every checkpoint and into the output folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The dataset is tokenized by now, so the tokenizer is no longer part of a fingerprint."""
        tokenizer = kwargs.get("processing_class")
        if session.CURRENT.record is not None and tokenizer is not None:
            fail_open(lambda: files.keep(tokenizer, session.CURRENT.processor))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint was written."""
        _write(state, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the model is saved a last time."""
        _write(state, args.output_dir)


def note_tokenized() -> None:
    """Puts the record beside the dataset that this run has tokenized: the next one trains on it as it is.

    It is done before the weights are loaded, as that is where runs fail.
    """
    made, folder = session.CURRENT.record, Path(session.CURRENT.tokenized_path or " ")
    if session.CURRENT.repairs and made is not None and folder.is_dir() and os.environ.get("RANK", "0") == "0":
        fail_open(lambda: record.write(folder, made))


def _write(state: Any, folder: str | Path) -> None:
    made = session.CURRENT.record
    if made is not None and state.is_world_process_zero:
        fail_open(lambda: record.write(folder, made))


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
    given: list[int] | int | None = getattr(owner, "eos_token_id", None)
    if given is None:
        return set()
    return set(given) if isinstance(given, list) else {given}
