"""What one process of LLaMA-Factory was started with, and what the hooks have told each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight import arguments, handoff
from llamafactory_preflight.templates import record
from llamafactory_preflight.templates.record import Record


@dataclass(kw_only=True, slots=True)
class Session:
    """The run of this process.

    Attributes:
        explicit: Names of the arguments that somebody set.
        model: Folder or name of the model.
        adapters: Folders of adapters.
        export_dir: Where a model is exported to.
        is_lora: Whether adapters are trained.
        additional_target: Modules that are trained whole beside them.
        processor: The multimodal processor, or None.
        tokenized_path: Where the tokenized dataset is, or will be.
        is_bypassed: Whether data is trained that was tokenized without the fixer.
        num_tokens: Size of the vocabulary as it was published.
        record: What is known of the training: read from a side file, or made by this run.
        repairs: Whether our template is in use.
        differences: What LLaMA-Factory's own template renders otherwise, one sentence each.
    """

    explicit: frozenset[str] = frozenset()
    model: str = ""
    adapters: tuple[str, ...] = ()
    export_dir: str = ""
    is_lora: bool = False
    additional_target: tuple[str, ...] = ()
    processor: Any = None
    tokenized_path: str = ""
    is_bypassed: bool = False
    num_tokens: int = 0
    record: Record | None = None
    repairs: bool = False
    differences: tuple[str, ...] = ()

    def found_record(self) -> Record | None:
        """The record of the last adapter that has one, or of the model."""
        records = (record.read(folder) for folder in (*reversed(self.adapters), self.model))
        return next((found for found in records if found is not None), None)


CURRENT = Session()
SAID: list[str] = []


def begin(given: Mapping[str, Any] | Sequence[str] | None, parsed: Sequence[Any]) -> None:
    """Remembers what LLaMA-Factory has parsed."""
    global CURRENT
    SAID.clear()
    by_name = given if isinstance(given, Mapping) else arguments.read(list(given or sys.argv[1:]))
    explicit = set(by_name)
    if os.environ.get("LLAMABOARD_ENABLED", "0").lower() in ("true", "y", "1"):
        explicit.discard("enable_thinking")  # the page always sends it
    model_args = parsed[0]
    finetuning = next((part for part in parsed if hasattr(part, "finetuning_type")), None)
    CURRENT = Session(
        explicit=frozenset(explicit),
        model=model_args.model_name_or_path or "",
        adapters=tuple(model_args.adapter_name_or_path or ()),
        export_dir=getattr(model_args, "export_dir", None) or "",
        is_lora=getattr(finetuning, "finetuning_type", "") == "lora",
        additional_target=tuple(getattr(finetuning, "additional_target", None) or ()),
    )
    CURRENT.record = CURRENT.found_record()
    data_args = next((part for part in parsed if hasattr(part, "tokenized_path")), None)
    CURRENT.tokenized_path = getattr(data_args, "tokenized_path", None) or ""
    if CURRENT.tokenized_path and os.path.isdir(CURRENT.tokenized_path) and os.listdir(CURRENT.tokenized_path):
        _use_tokenized(CURRENT.tokenized_path)


def _use_tokenized(folder: str) -> None:
    found = record.read(folder)
    if found is not None:
        CURRENT.record = found
        return
    CURRENT.is_bypassed = True
    say("tokenized_path is used as it is: what was tokenized without the fixer is neither looked at nor repaired")


def say(message: str, *lines: str) -> None:
    """Says something once a run in LLaMA-Factory's log, which LLaMA-Board shows.

    The log goes to standard output. It is repeated on standard error only if that leads elsewhere.

    Args:
        message: One line.
        lines: More of them, which are indented.
    """
    from llamafactory.extras import logging

    text = "\n  ".join([message, *lines])
    if text in SAID:
        return
    SAID.append(text)
    logging.get_logger("llamafactory.data.template").warning_rank0(f"llamafactory-preflight: {text}")
    if handoff.speaks() and not _is_one_place():
        handoff.say(f"template: {text}")


def _is_one_place() -> bool:
    """Whether both streams lead to the same terminal, file or pipe; streams without a file, as in notebooks, do."""
    try:
        output, error = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):
        return True
    return os.path.samestat(output, error)
