"""What one process of LLaMA-Factory was started with, and what the hooks have told each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
        num_tokens: Size of the vocabulary as it was published.
        record: What is known of the training: read from a side file, or made by this run.
        repairs: Whether our template is in use.
    """

    explicit: frozenset[str] = frozenset()
    model: str = ""
    adapters: tuple[str, ...] = ()
    export_dir: str = ""
    is_lora: bool = False
    additional_target: tuple[str, ...] = ()
    processor: Any = None
    num_tokens: int = 0
    record: Record | None = None
    repairs: bool = False

    def found_record(self) -> Record | None:
        """The record of the last adapter that has one, or of the model."""
        records = (record.read(folder) for folder in (*reversed(self.adapters), self.model))
        return next((found for found in records if found is not None), None)


CURRENT = Session()
SAID: list[str] = []


def begin(given: Mapping[str, Any] | Sequence[str] | None, parsed: Sequence[Any]) -> None:
    """Remembers what LLaMA-Factory has parsed."""
    global CURRENT
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
    if data_args is not None and data_args.tokenized_path and Path(data_args.tokenized_path).is_dir():
        say("tokenized_path is used as it is: what was tokenized before is neither looked at nor repaired")


def say(message: str) -> None:
    """One line on standard error and one in LLaMA-Factory's log, which LLaMA-Board shows."""
    from llamafactory.extras import logging

    SAID.append(message)
    handoff.warn_once(f"template: {message}")
    logging.get_logger("llamafactory.data.template").warning_rank0(f"llamafactory-preflight: {message}")
