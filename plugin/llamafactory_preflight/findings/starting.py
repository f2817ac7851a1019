"""What a run begins with beside its model: a checkpoint to go on from, and adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


STATE = "trainer_state.json"
"""What `Trainer.train` reads of a checkpoint in any case, once the weights are loaded (transformers/trainer.py)."""
ADAPTER = "adapter_config.json"
EXAMPLE = "checkpoint-500"
FOLDER = re.compile(r"checkpoint-\d+")
WHOLE_MODEL_STAGES = ("rm", "ppo")
"""Where LLaMA-Factory sets `resume_from_checkpoint` aside but for adapters (hparams/parser.py)."""


def checkpoint(run: RunDescription, *, trains: bool) -> Iterator[Finding]:
    """`resume_from_checkpoint` names a folder, or is true for the last one in `output_dir`; false is none.

    Args:
        run: The run.
        trains: Whether it starts here and now; otherwise the checkpoint may be on the machine that it is planned for.
    """
    asked = run.resume_from_checkpoint
    unread = run.stage in WHOLE_MODEL_STAGES and run.finetuning_type in ("full", "freeze")
    if not asked or not trains or not run.do_train or unread:
        return
    if asked is True:
        folder = os.path.expanduser(run.output_dir or "trainer_output")
        if not _checkpoints(folder):
            yield Finding(
                id="checkpoint-missing",
                severity="error",
                message=phrase(
                    "`resume_from_checkpoint: true` goes on from the last checkpoint in `output_dir`, and {folder} "
                    "has none. Leave it out to begin anew.",
                    folder=folder,
                ),
            )
    elif not os.path.isfile(os.path.join(asked, STATE)):
        yield Finding(
            id="checkpoint-missing",
            severity="error",
            message=phrase(
                "`resume_from_checkpoint: {folder}` is no checkpoint, as it has no {file}. Name a folder that a "
                "training has saved, such as {example}.",
                folder=asked,
                file=STATE,
                example=os.path.join(asked, (_checkpoints(asked) or [EXAMPLE])[-1]),
            ),
        )


def adapters(run: RunDescription, *, trains: bool) -> Iterator[Finding]:
    """PEFT reads adapters of a folder or of the hub, whose names have one slash at most and no dot in front."""
    if not trains or run.finetuning_type != "lora" or run.use_unsloth or run.use_kt:
        return
    for name in run.adapter_name_or_path:
        is_folder = name.startswith((".", "/", "~")) or name.count("/") > 1
        file = os.path.join(name, run.adapter_folder or "", ADAPTER)
        if is_folder and not os.path.isfile(file):
            yield Finding(
                id="adapter-missing",
                severity="error",
                message=phrase(
                    "`adapter_name_or_path: {name}` is no adapter, as {file} does not exist. Correct the path.",
                    name=name,
                    file=file,
                ),
            )


def _checkpoints(folder: str) -> list[str]:
    """The checkpoints in an output folder, by age."""
    try:
        names = [path.name for path in Path(folder).iterdir() if FOLDER.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))
