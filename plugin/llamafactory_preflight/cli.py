"""The subcommands that the plugin adds: `preflight`, `presets`, `template` and `doctor`."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llamafactory_preflight.errors import UserError, words


USAGE = """\
preflight FILE [key=value ...]  tell whether a training run fits, without starting it (also: check)
presets [list | show | copy]    training presets of this pack
template FILE [key=value ...]   show the samples of a training run as the model will see them
doctor                          what is installed, and whether the plugin is live"""
YAML_SUFFIXES = (".yaml", ".yml")
INTERRUPTED = 130  # as shells call it: 128 and the number of SIGINT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", next_step=f"See {self.prog} --help")


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand.

    Args:
        argv: Its name and its arguments; `check` is another name of `preflight`.

    Returns:
        0: fits, tight, or done. 1: will not fit, or not healthy. 2: cannot tell, or faulty input.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack the letters of a path
    verbs = {"preflight": _preflight, "check": _preflight, "presets": _presets}
    verbs |= {"template": _template, "doctor": _doctor}
    try:
        if argv and argv[0] in {"-h", "--help"}:
            print(USAGE)
            return 0
        if not argv or argv[0] not in verbs:
            given = f"There is no subcommand {argv[0]!r}" if argv else "A subcommand is missing"
            raise UserError(given, next_step=f"There are {', '.join(verbs)}")
        code = verbs[argv[0]](argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()  # here and not at exit, where Python would complain by itself
        return code
    except UserError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        _silence_output()
        if not isinstance(error, BrokenPipeError):  # that one means that the reader has seen enough
            _complain(f"{error.filename or 'The output or the working folder'} cannot be used: {words(error)}.")
    except Exception as error:
        # Left to Python it would be a traceback and exit code 1, which means `will not fit`.
        place = traceback.extract_tb(error.__traceback__)[-1]
        _complain(
            f"llamafactory-preflight has a fault: {type(error).__name__}: {words(error)} "
            f"({Path(place.filename).name}, line {place.lineno}). Please report it with the file that you gave."
        )
    return 2


def _complain(message: str) -> None:
    print(message, file=sys.stderr)


def _silence_output() -> None:
    """What is still in the buffer cannot be written, and Python would try it again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _preflight(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="llamafactory-cli preflight",
        description="Tells whether a training run fits, without starting it.",
        epilog="Exit codes: 0 fits or tight, 1 will not fit, 2 cannot tell or faulty input; the worst of several.",
    )
    parser.add_argument(
        "items", nargs="*", metavar="FILE|key=value", help="YAML or JSON files, `-`, and overrides for all"
    )
    parser.add_argument("--gpu", help="plan for this card: its memory (24GiB) or name (rtx4090)")
    parser.add_argument("--free", help="what the allocator may use on the card, CUDA context left out (21.5GiB)")
    parser.add_argument("--device", type=int, help="look at this visible GPU only")
    parser.add_argument("--gpus", type=int, help="number of GPUs that take part")
    parser.add_argument("--host-ram", help="plan for this main memory (64GiB)")
    parser.add_argument(
        "--exact", action="store_true", help="simulate the run: some seconds, and any architecture that is installed"
    )
    parser.add_argument(
        "--accelerate-config", type=Path, help="the file that accelerate launch gets, for a run under FSDP"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--fit", action="store_true", help="change the least costly settings until the run fits")
    parser.add_argument("--allow", help="what --fit may change too: quantization,cutoff,precision,...")
    parser.add_argument("-o", "--output", type=Path, help="write what --fit or --tune found to this file")
    parser.add_argument("--force", action="store_true", help="let -o overwrite a file")
    parser.add_argument("--tune", action="store_true", help="find the fastest settings that fit and train the same")
    parser.add_argument("--model", help="with --tune: make a preset for this model instead of reading a file")
    parser.add_argument("--method", help="of that preset: lora (the default), qlora, full or freeze")
    options = parser.parse_intermixed_args(_amounts_joined(argv))
    from llamafactory_preflight import preflight, report
    from llamafactory_preflight.software import Software

    overrides = [item for item in options.items if "=" in item and not os.path.exists(item)]
    files = [item for item in options.items if item not in overrides]
    if options.model is None and not files:
        raise UserError("No file is given", next_step="Name a YAML file, or - for standard input")
    if options.method is not None and options.model is None:
        raise UserError("--method goes with --model: a file has its own method", next_step="Leave it out")
    machine = {name: getattr(options, name) for name in ("gpu", "free", "device", "gpus", "host_ram")}
    if options.fit or options.tune or options.model is not None:
        return _changed(options, files, overrides, machine)
    if options.output is not None or options.force or options.allow is not None:
        raise UserError("-o, --force and --allow go with --fit, --tune or --model", next_step="Add one of these")
    worst = 0
    for position, file in enumerate(files):
        try:
            result = preflight.check(
                file, overrides=overrides, exact=options.exact, accelerate_config=options.accelerate_config, **machine
            )
        except UserError as error:
            worst = 2
            _complain(str(error))
            if options.json:
                print(report.error_as_json(error, origin=file, versions=Software.installed().as_dict()))
            continue
        worst = max(worst, result.exit_code)
        if options.json:
            print(report.as_json(result))
        else:
            print(f"{chr(10) if position else ''}{report.text(result)}")
    return worst


def _changed(options: argparse.Namespace, files: list[str], overrides: list[str], machine: dict[str, Any]) -> int:
    """The report of a run that was changed to fit or to be faster."""
    if len(files) + (options.model is not None) > 1 or (options.fit and options.tune):
        what = "--fit and --tune take one file at a time, or --model instead of it, and only one of the two"
        raise UserError(what, next_step="Leave one out")
    if options.allow is not None and (options.tune or options.model is not None):
        raise UserError("--allow goes with --fit: --tune changes nothing that is trained", next_step="Leave it out")
    if options.output is not None and files and not files[0].endswith(YAML_SUFFIXES):
        raise UserError("-o needs a YAML file to start from", where=files[0], next_step="Name one")
    if options.accelerate_config is not None:
        raise UserError("--fit, --tune and --model do not know --accelerate-config yet", next_step="Leave it out")
    if options.exact:
        raise UserError("--exact simulates a run as it is", next_step="Leave out --fit, --tune and --model")
    if options.output is not None:
        _check_output(options.output, force=options.force)
    from llamafactory_preflight.commands import fit, tune

    where = {"output": options.output, "as_json": options.json, **machine}
    if options.model is not None:
        return tune.create(options.model, "lora" if options.method is None else options.method, overrides, **where)
    if options.tune:
        return tune.run(files[0], overrides, **where)
    return fit.run(files[0], overrides, allow=options.allow or "", **where)


def _check_output(file: Path, *, force: bool) -> None:
    """Looks before the search begins whether its file may be written."""
    if file.is_dir():
        raise UserError(f"{file} is a folder", next_step="Name a file in it")
    if file.suffix not in YAML_SUFFIXES:
        raise UserError(f"-o writes YAML, and {file} is no such name", next_step="Let it end with .yaml")
    if not file.parent.is_dir():
        raise UserError(f"{file} cannot be written: its folder does not exist", next_step="Make the folder first")
    if os.path.lexists(file) and not force:
        raise UserError(f"{file} exists already", next_step="Nothing was written; --force overwrites it")


def _amounts_joined(argv: Sequence[str]) -> list[str]:
    """Joins an amount below zero to its option: argparse would take it for another option."""
    joined: list[str] = []
    for item in argv:
        if re.match(r"-\.?\d", item) and joined and joined[-1] in {"--gpu", "--free", "--host-ram"}:
            joined[-1] += f"={item}"
        else:
            joined.append(item)
    return joined


def _presets(argv: Sequence[str]) -> int:
    parser = _Parser(prog="llamafactory-cli presets", description="Training presets of this pack.")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("list", help="all presets, and whether they fit here")
    show = verbs.add_parser("show", help="print a preset")
    show.add_argument("name")
    copy = verbs.add_parser("copy", help="write a preset and the files that it needs")
    copy.add_argument("name", nargs="?", help="a preset; with --board it may be left out, for all of them")
    copy.add_argument("directory", nargs="?", type=Path, default=Path())
    copy.add_argument("--board", action="store_true", help="as configs that LLaMA-Board can load")
    copy.add_argument("--force", action="store_true", help="overwrite files that are in the way")
    options = parser.parse_args(list(argv))
    from llamafactory_preflight import presets
    from llamafactory_preflight.commands import preset_table

    if options.verb == "show":
        print(presets.find(options.name).file.read_text(encoding="utf-8"), end="")
    elif options.verb == "copy" and options.board:
        from llamafactory_preflight.board import configs

        chosen = [presets.find(options.name)] if options.name else presets.available()
        print(*configs.copy(chosen, options.directory, force=options.force), sep="\n")
    elif options.verb == "copy":
        if options.name is None:
            parser.error("the name of a preset is missing")
        print(*presets.copy(options.name, options.directory, force=options.force), sep="\n")
        if said := presets.missing_data(options.name, options.directory):
            _complain(said)
    else:
        print("\n".join(preset_table.lines(presets.available())))
    return 0


def _template(argv: Sequence[str]) -> int:
    parser = _Parser(prog="llamafactory-cli template", description="Shows what the model sees of a run's samples.")
    parser.add_argument("items", nargs="+", metavar="FILE|key=value", help="a YAML or JSON file, and overrides")
    parser.add_argument("--sample", type=int, default=3, help="how many samples to print")
    parser.add_argument("--html", type=Path, help="also write them to this page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(list(argv))
    from llamafactory_preflight.commands import template

    return template.run(
        options.items[0], options.items[1:], num_samples=options.sample, html=options.html, as_json=options.json
    )


def _doctor(argv: Sequence[str]) -> int:
    _Parser(prog="llamafactory-cli doctor", description="Shows whether the plugin works here.").parse_args(list(argv))
    from llamafactory_preflight.commands import doctor

    print("\n".join(doctor.lines()))
    return 0 if doctor.is_healthy() else 1
