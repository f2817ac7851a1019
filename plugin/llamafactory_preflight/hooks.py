"""Where the plugin reaches into LLaMA-Factory. No other module names a function of it to patch.

Every hook fails open: whatever goes wrong in here is one line on standard error, and LLaMA-Factory goes on.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from llamafactory_preflight import handoff
from llamafactory_preflight.arguments import refusal
from llamafactory_preflight.board import around as board
from llamafactory_preflight.failing import fail_open as _fail_open
from llamafactory_preflight.fixer import around as fixer
from llamafactory_preflight.watch import around as watch


SUBCOMMANDS = ("preflight", "presets", "template", "doctor")
USAGE = """\
| Added by llamafactory-preflight:
|   llamafactory-cli preflight A.yaml: tell whether a training run fits the GPU
|   llamafactory-cli presets: list, show or copy training presets
|   llamafactory-cli template A.yaml: show the samples of a training run as the model will see them
|   llamafactory-cli doctor: show what is installed and whether the plugin is live"""

_V1_TRAIN_COMMANDS = ("train", "sft", "dpo", "rm")


def _around_main(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs our own subcommands here, because what follows imports torch, which takes seconds."""

    @functools.wraps(original)
    def main(*args: Any, **kwargs: Any) -> Any:
        _run_own_subcommand()
        if _command() in _V1_TRAIN_COMMANDS:
            _fail_open(_tell_of_v1, None)
        return original(*args, **kwargs)

    return main


def _around_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a run before torchrun starts, so that a refusal is one message and not one traceback per rank."""

    @functools.wraps(original)
    def launch(*args: Any, **kwargs: Any) -> Any:
        _run_own_subcommand()  # `python -m llamafactory.cli` comes here without passing the `main` that we wrapped
        command, arguments = _command(), sys.argv[2:]
        if command == "train" and arguments:
            sys.argv += _fail_open(functools.partial(_check_or_end, arguments), [])
        if command == "train":
            return _answering(functools.partial(original, *args, **kwargs), arguments)
        result = original(*args, **kwargs)
        if command in ("", "help"):
            print(USAGE)
        return result

    return launch


def _around_get_train_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a run in the process that trains: a rank, a Ray worker, or a program that calls `run_exp(args)`."""

    @functools.wraps(original)
    def get_train_args(args: dict[str, Any] | list[str] | None = None, *others: Any, **named: Any) -> Any:
        if args:
            none: list[str] = []
            changes = _fail_open(functools.partial(_check, args, "process"), none)
            args = _fail_open(functools.partial(_with_changes, args, changes), args)
        if isinstance(args, dict):
            args = _fail_open(functools.partial(_with_found_paths, args), args)
        handoff.remember(args)
        try:
            return original(args, *others, **named)
        except Exception as error:
            _fail_open(functools.partial(_refused, error), None)
            raise

    return get_train_args


def _around_get_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Looks a second time when the data is tokenized: every workflow loads the weights after it."""

    @functools.wraps(original)
    def get_dataset(*args: Any, **kwargs: Any) -> Any:
        dataset_module = original(*args, **kwargs)
        _fail_open(functools.partial(_check_data, dataset_module), None)
        return dataset_module

    return get_dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPoint:
    """One function of LLaMA-Factory that we wrap right after its module was imported.

    Attributes:
        module: Full name of the module.
        attribute: Name of the function in it.
        around: Makes the wrapper from the original.
    """

    module: str
    attribute: str
    around: Callable[[Callable[..., Any]], Callable[..., Any]]


POINTS = (
    PatchPoint(module="llamafactory.cli", attribute="main", around=_around_main),
    PatchPoint(module="llamafactory.launcher", attribute="launch", around=_around_launch),
    PatchPoint(module="llamafactory.train.tuner", attribute="get_train_args", around=_around_get_train_args),
    PatchPoint(module="llamafactory.data.loader", attribute="get_dataset", around=_around_get_dataset),
    PatchPoint(module="llamafactory.train.tuner", attribute="_training_function", around=watch.training_function),
    *(
        PatchPoint(module="llamafactory.hparams.parser", attribute=name, around=fixer.repairing("parsed", after=True))
        for name in ("_parse_train_args", "_parse_infer_args", "_parse_eval_args")
    ),
    PatchPoint(
        module="llamafactory.model.loader",
        attribute="load_tokenizer",
        around=fixer.repairing("tokenizer_loaded", after=True),
    ),
    PatchPoint(module="llamafactory.model.loader", attribute="load_model", around=fixer.repairing("model")),
    PatchPoint(module="llamafactory.train.tuner", attribute="run_exp", around=fixer.repairing("training")),
    PatchPoint(
        module="llamafactory.data.template",
        attribute="get_template_and_fix_tokenizer",
        around=fixer.repairing("template"),
    ),
    PatchPoint(
        module="llamafactory.data.converter", attribute="get_dataset_converter", around=fixer.repairing("converter")
    ),
    PatchPoint(
        module="llamafactory.data.loader", attribute="_get_dataset_processor", around=fixer.repairing("processor")
    ),
    PatchPoint(
        module="llamafactory.data.loader",
        attribute="_get_preprocessed_dataset",
        around=fixer.repairing("preprocessed"),
    ),
    PatchPoint(
        module="llamafactory.webui.components.train", attribute="create_train_tab", around=board.create_train_tab
    ),
    PatchPoint(
        module="llamafactory.webui.components.train", attribute="change_stage", around=board.keeping("change_stage")
    ),
    PatchPoint(
        module="llamafactory.webui.components.top", attribute="get_model_info", around=board.keeping("get_model_info")
    ),
    PatchPoint(module="llamafactory.webui.common", attribute="_clean_cmd", around=board.keeping("_clean_cmd")),
)
MODULES = frozenset(point.module for point in POINTS)


def apply(module: ModuleType) -> None:
    """Wraps the patch points of a module that was just imported, or imported again."""
    for point in POINTS:
        if point.module != module.__name__:
            continue
        original = getattr(module, point.attribute, None)
        if not callable(original):
            _fail_open(functools.partial(_warn_missing, point), None)
        elif not is_applied(original):
            wrapper = point.around(original)
            wrapper.__llamafactory_preflight__ = True  # type: ignore[attr-defined]
            setattr(module, point.attribute, wrapper)


def is_applied(function: object) -> bool:
    """Whether this is one of our wrappers; `importlib.reload` can bring them here a second time."""
    return getattr(function, "__llamafactory_preflight__", False) is True


def _warn_missing(point: PatchPoint) -> None:
    handoff.warn_once(f"this LLaMA-Factory has no {point.module}.{point.attribute}; what hooks in there is not active")


def _tell_of_v1() -> None:
    from llamafactory_preflight.settings import is_enabled

    if is_enabled(os.environ, "USE_V1"):
        handoff.warn_once("memory unknown: USE_V1=1 is not modelled, and its chat templates are not repaired")


def _command() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else ""


def _run_own_subcommand() -> None:
    if _command() in SUBCOMMANDS:
        from llamafactory_preflight import cli

        raise SystemExit(cli.main(sys.argv[1:]))


def _check_or_end(given: list[str]) -> list[str]:
    """Looks at a run before torchrun starts. Only a mistake that LLaMA-Factory cannot get past either ends it here."""
    from llamafactory_preflight import arguments
    from llamafactory_preflight.errors import Refused, UserError

    try:
        refusal.try_json(given, lambda: _parser().read_args())
        return _check(given, "launcher")
    except UserError as error:
        names = set() if isinstance(error, Refused) else arguments.names(given)
        if refusal.is_certain(error, names, _argument_names):
            refusal.end(str(error))
        refusal.remember_fault(error)
        raise


def _argument_names() -> set[str]:
    """The names that LLaMA-Factory's parser takes, from the classes that it takes them from."""
    return {field.name for part in _parser()._TRAIN_ARGS for field in fields(part) if field.init}


def _parser() -> Any:
    return importlib.import_module("llamafactory.hparams.parser")


def _refused(error: Exception) -> None:
    refusal.remember_refused(error)
    refusal.end_rank(error)


def _answering(launch: Callable[[], Any], arguments: list[str]) -> Any:
    """Trains, and says in one message what a traceback of LLaMA-Factory or of torchrun does not."""
    nothing: dict[str, int] = {}
    kills_before = _fail_open(watch.kills_so_far, nothing)
    note = _fail_open(refusal.open_note, None)
    try:
        return launch()
    except Exception as error:
        _fail_open(functools.partial(watch.answer_for_children, error, arguments, kills_before), None)
        _fail_open(functools.partial(refusal.end_with, error, note), None)
        raise
    finally:
        if note is not None:
            _fail_open(functools.partial(refusal.close_note, note), None)


def _check(given: dict[str, Any] | list[str], stage: Literal["launcher", "process"]) -> list[str]:
    """Looks at a run and returns what is to be added to its command line so that it fits: in `fit` mode only."""
    if "-h" in given or "--help" in given or (stage == "process" and not handoff.speaks()):
        return []
    from llamafactory_preflight import arguments, guard
    from llamafactory_preflight.fitting import fit

    by_name = given if isinstance(given, dict) else arguments.read(given)
    if handoff.is_checked(by_name):
        return []
    if stage == "launcher":  # before the check: a child does not repeat one that failed
        handoff.mark_checked(by_name, config_file=sys.argv[2])
    changes = guard.train(by_name, stage=stage)
    if changes and stage == "launcher":
        handoff.mark_checked(by_name | dict(changes), config_file=sys.argv[2])
    flags = isinstance(given, list) and not given[0].endswith(arguments.CONFIG_SUFFIXES)
    return fit.as_arguments(changes, flags=flags)


def _with_changes(given: dict[str, Any] | list[str], changes: list[str]) -> dict[str, Any] | list[str]:
    if isinstance(given, list):
        return [*given, *changes]
    from omegaconf import OmegaConf

    return given | {str(key): value for key, value in OmegaConf.from_cli(changes).items()}


def _check_data(dataset_module: Mapping[str, Any]) -> None:
    from llamafactory_preflight import arguments, guard
    from llamafactory_preflight.data import lengths

    given = handoff.remembered()
    longest = lengths.longest(dataset_module) if given else None
    watch.data_is_read(longest)
    if given and longest is not None:
        by_name = given if isinstance(given, dict) else arguments.read(given)
        count = functools.partial(lengths.images, dataset_module)
        guard.data(by_name, longest, count_images=count, speaks=handoff.speaks())


def _with_found_paths(given: dict[str, Any]) -> dict[str, Any]:
    """Lets LLaMA-Factory find what a preset names, in every rank, from whatever folder the run was started."""
    from llamafactory_preflight import arguments
    from llamafactory_preflight.arguments import paths

    config_file = handoff.config_file() or _command()
    beside = Path(config_file).resolve().parent if config_file.endswith(arguments.CONFIG_SUFFIXES) else None
    return paths.resolve(given, beside=beside)[0]
