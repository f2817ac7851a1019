"""Folders that a run goes on from: adapters and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


def folders(run: RunDescription, *, trains: bool) -> Iterator[Finding]:
    """LLaMA-Factory opens them when the weights are loaded; the Trainer needs a path for a checkpoint.

    Args:
        run: The run.
        trains: Whether it starts here and now; otherwise they may be on the machine that it is planned for.
    """
    severity: Literal["error", "warning"] = "error" if trains else "warning"
    for folder in run.adapter_name_or_path if run.finetuning_type in ADAPTERS else ():
        # A name with one slash may be a hub's.
        is_path = folder.startswith((".", "/", "~")) or folder.count("/") > 1
        if is_path and not os.path.isdir(folder):
            yield Finding(
                id="adapter-missing",
                severity=severity,
                message=phrase(
                    "The adapter {folder} does not exist (`adapter_name_or_path`). Check the path.", folder=folder
                ),
            )
    checkpoint = run.resume_from_checkpoint
    dropped = run.stage in ("rm", "ppo") and run.finetuning_type not in ADAPTERS
    if checkpoint is not None and run.do_train and not dropped and not os.path.isdir(checkpoint):
        yield Finding(
            id="checkpoint-missing",
            severity=severity,
            message=phrase(
                "The checkpoint {folder} does not exist (`resume_from_checkpoint`). Give a folder such as "
                "{example}, or true for the last one in `output_dir`.",
                folder=checkpoint,
                example=f"{run.output_dir or 'saves'}/checkpoint-500",
            ),
        )
