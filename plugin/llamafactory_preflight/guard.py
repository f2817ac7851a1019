"""Looks at a training that is about to start: reports on it, and stops it if it certainly cannot fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from llamafactory_preflight import arguments, device, findings, handoff, preflight, report
from llamafactory_preflight.data.images import Counted
from llamafactory_preflight.data.lengths import Longest
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.fitting import fit, judgement
from llamafactory_preflight.machine import allocator, host, survey
from llamafactory_preflight.result import Result
from llamafactory_preflight.settings import GPU_VARIABLE, Settings


SHORTEST_LENGTH = 16  # Tokens of a sample that any data set may be made of.


def train(given: Mapping[str, Any], *, stage: Literal["launcher", "process"]) -> Mapping[str, Any]:
    """Reports on standard error, and ends the process before anything is loaded if that has no chance.

    Args:
        given: The arguments by name.
        stage: `launcher` before torchrun starts, `process` in the process that trains.

    Returns:
        In `fit` mode the arguments to change so that the run fits; else nothing.

    Raises:
        SystemExit: With 1, in `block` and `fit` mode, where the run cannot fit the GPU at any sample length, or a
            finding would end it anyway.
        UserError: An argument is faulty; LLaMA-Factory will say so itself, so this is only a hint.
    """
    settings = Settings.from_environment()
    allocator.prefer_expandable_segments(os.environ)  # before anything starts CUDA
    result = looked_at(given, settings, stage=stage)
    print(report.text(result), file=sys.stderr, flush=True)
    if settings.mode != "warn" and findings.stops(result.findings):
        print(report.REFUSAL, file=sys.stderr, flush=True)
        raise SystemExit(1)
    if settings.mode == "fit" and result.verdict.word in ("tight", "will_not_fit"):
        # Ranks that torchrun started without our parent might each choose something else.
        remedy = fit.fitting(result, allow=settings.allow) if handoff.is_alone() or stage == "launcher" else None
        if remedy is not None:
            answer = judgement.judge_with_host(remedy.estimate, result.device, result.host_budget_bytes)
            print(report.fitted(remedy, answer), file=sys.stderr, flush=True)
            return remedy.set
    if settings.mode == "warn" or result.device is None or result.verdict.word != "will_not_fit":
        return {}
    if not _fits_when_short(result):
        print(report.REFUSAL, file=sys.stderr, flush=True)
        raise SystemExit(1)
    print(report.LENGTH_DECIDES, file=sys.stderr, flush=True)
    return {}


def data(
    given: Mapping[str, Any],
    longest: Longest,
    *,
    count_images: Callable[[int], Counted | None] | None = None,
    speaks: bool,
) -> None:
    """The second look, when the data is tokenized and no weights are loaded: the longest sample decides.

    Args:
        given: The arguments by name.
        longest: The longest sample of the training set, and of those that are evaluated.
        count_images: Counts the tokens of images in it.
        speaks: Whether this process is the one that reports.

    Raises:
        SystemExit: With 1, in `block` mode, where the fullest batch that the data can make does not fit.
    """
    settings = Settings.from_environment()
    # Of several processes each gets a full batch all the same: accelerate begins again with the first samples.
    ends_short = handoff.is_alone() and not given.get("dataloader_drop_last")
    result = looked_at(
        given, settings, stage="process", length=longest.tokens, eval_length=longest.eval_tokens,
        count_images=count_images, num_samples=longest.num_samples if ends_short else None,
    )  # fmt: skip
    if speaks:
        for finding in findings.disk_after_data(result, num_samples=longest.num_samples):
            print(f"llamafactory-preflight: {report.finding_line(finding)}", file=sys.stderr, flush=True)
    if result.device is None or result.estimate is None or result.run.packing:
        return
    stops = settings.mode != "warn" and result.verdict.word == "will_not_fit"
    if speaks:
        print(report.second_look(result, longest, stops=stops), file=sys.stderr, flush=True)
    if stops:
        raise SystemExit(1)


def looked_at(
    given: Mapping[str, Any],
    settings: Settings,
    *,
    stage: Literal["launcher", "process"],
    length: int | None = None,
    eval_length: int | None = None,
    count_images: Callable[[int], Counted | None] | None = None,
    num_samples: int | None = None,
) -> Result:
    """A preflight of this run on this machine, or on the card that is planned for."""
    command = sys.argv[2:] if stage == "launcher" else sys.argv[1:]
    file = Path(command[0]) if command and command[0].endswith(arguments.CONFIG_SUFFIXES) else None
    return preflight.examine(
        given,
        origin=str(file or "the arguments"),
        beside=file.resolve().parent if file else None,
        devices=survey.taking_part(_planned(settings)),
        host_budget_bytes=host.available_bytes(),
        here=host.main_memory(),
        length=length,
        eval_length=eval_length,
        count_images=count_images,
        num_samples=num_samples,
        overridden=arguments.overridden(command[1:]) if file else frozenset(),
    )


def _planned(settings: Settings) -> device.Device | None:
    """The card that the variable names; a faulty one does not leave the run unchecked."""
    try:
        return device.planned(gpu=settings.gpu, where=GPU_VARIABLE)
    except UserError as error:
        handoff.warn_once(f"{error} For now it counts as not set.")
        return None


def _fits_when_short(result: Result) -> bool:
    """Whether the run could fit if every sample were short; packing fills each sequence, so there it cannot."""
    if result.run.packing or result.shape is None:
        return False
    length = min(SHORTEST_LENGTH, result.run.cutoff_len)
    estimate = judgement.predictor(result, length=length, eval_length=length)(result.run)
    return judgement.judge(estimate, result.device, result.host_budget_bytes).word != "will_not_fit"
