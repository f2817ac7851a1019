"""Reads the arguments of a run as LLaMA-Factory's `read_args` does, whose own module would import torch."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from llamafactory_preflight.arguments import schema
from llamafactory_preflight.errors import Refused, UserError, words


if TYPE_CHECKING:
    import yaml

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
ONE_A_LINE = "Write one `key: value` a line"


def read(source: Path | Literal["-"] | Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads one set of arguments.

    Args:
        source: A YAML or JSON file, `-` for YAML on standard input, or a command line, which is either
            `[file, key=value, ...]` or `["--key", "value", ...]`.
        overrides: `key=value` items that win over the file.

    Returns:
        The arguments by name, with values as YAML types them.

    Raises:
        UserError: The file is missing, is not YAML or holds no mapping, or an override is malformed.
    """
    if source == "-":
        return _merged(_standard_input(), "standard input", overrides)
    if isinstance(source, Path):
        return _merged(_text(source), str(source), overrides, as_json=source.suffix == ".json")
    if source and source[0].endswith(CONFIG_SUFFIXES):
        return read(Path(source[0]), [*source[1:], *overrides])
    return _from_flags(source)


def names(command: Sequence[str]) -> set[str]:
    """Names that a command line of a file and overrides sets, also by a malformed override; none of one of flags.

    Raises:
        UserError: As `read`, for the file.
    """
    if not command[0].endswith(CONFIG_SUFFIXES):
        return set()
    return set(read(command[:1])) | overridden(command[1:])


def overridden(overrides: Sequence[str]) -> frozenset[str]:
    """Names of the arguments that `key=value` items set; `key.inner=value` sets a part of one."""
    return frozenset(re.split(r"[=.\[]", item)[0] for item in overrides)


def with_overrides(given: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Arguments with `key=value` items that win over them.

    Raises:
        UserError: An override is malformed.
    """
    return _merged(json.dumps(dict(given)), "the command line", overrides, as_json=True)


def _text(file: Path) -> str:
    if file.suffix not in CONFIG_SUFFIXES:
        raise UserError(
            f"{file} is not a .yaml, .yml or .json file",
            next_step="LLaMA-Factory reads no others; overrides are written key=value",
        )
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refused(
            f"{file} does not exist", next_step="Check the path, or see `llamafactory-cli presets list`"
        ) from None
    except UnicodeDecodeError:
        raise Refused(f"{file} is not UTF-8 text", next_step="Save it as UTF-8") from None
    except OSError as error:
        raise Refused(f"{file} cannot be read: {words(error)}") from None


def _standard_input() -> str:
    if sys.stdin is None:  # closed by whoever started us
        return ""
    try:
        text = sys.stdin.read()
        text.encode()  # Python lets through what is not UTF-8, as surrogates
    except UnicodeError:
        raise UserError("standard input is not UTF-8 text") from None
    return text


def _merged(text: str, origin: str, overrides: Sequence[str], *, as_json: bool = False) -> dict[str, Any]:
    # PyYAML would read 1e-4 as text; OmegaConf's loader, which LLaMA-Factory uses, reads a number.
    import yaml
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.create(json.loads(text)) if as_json else OmegaConf.load(io.StringIO(text))
        if not isinstance(loaded, DictConfig):
            kind = "a list" if isinstance(loaded, ListConfig) else "no arguments"
            raise Refused(f"{origin} holds {kind}", next_step=ONE_A_LINE)
        _check(overrides)
        merged = OmegaConf.to_container(OmegaConf.merge(loaded, OmegaConf.from_cli(list(overrides))))
    except json.JSONDecodeError as error:
        raise Refused(f"{origin} is not JSON: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Refused(f"{origin} is not YAML: {_problem(error)}{place}") from None
    except yaml.YAMLError as error:
        raise Refused(f"{origin} is not YAML: {words(error)}") from None
    except RecursionError:
        raise UserError(f"{origin} is nested too deeply", next_step=ONE_A_LINE) from None
    except (OmegaConfBaseException, OSError, TypeError) as error:
        raise UserError(f"{origin} holds no mapping of arguments: {words(error)}", next_step=ONE_A_LINE) from None
    if not isinstance(merged, dict) or all(value is None for value in merged.values()):
        raise Refused(f"{origin} holds no arguments", next_step=ONE_A_LINE)
    return {str(key): value for key, value in merged.items()}


def _check(overrides: Sequence[str]) -> None:
    """Each by itself, so that the one that is malformed is named and not the file.

    Raises:
        UserError: One is no `key=value`, or its value is not YAML.
    """
    import yaml
    from omegaconf import OmegaConf

    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            raise UserError(f"{item!r} is not an override", next_step="Write it as key=value")
        try:
            OmegaConf.from_cli([item])
        except yaml.MarkedYAMLError as error:
            raise Refused(
                f"The value in {item!r} is not YAML: {_problem(error)}", next_step="Put the item in quotes, whole"
            ) from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    """What is wrong, without where; PyYAML says some of it in halves."""
    problem = str(error.problem).rstrip(".")
    return f"{error.context} {problem}" if problem.startswith("but ") else problem


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, where="command line")


def _from_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Parses `--key value`, with the conversions HfArgumentParser makes; only what was given is returned."""
    known = schema.load()
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for argument in known.arguments.values() if known else ():
        _add(parser, argument)
    namespace, unknown = parser.parse_known_args(list(argv))
    given = vars(namespace)
    for position, item in enumerate(unknown):
        if item.startswith("--"):
            name, equals, value = item[2:].partition("=")
            following = unknown[position + 1 :][:1]
            given[name] = value if equals else next((v for v in following if not v.startswith("--")), True)
        elif position == 0:
            raise UserError(f"{item!r} is not an argument", where="command line", next_step="Write --key value")
    return given


def _add(parser: argparse.ArgumentParser, argument: schema.Argument) -> None:
    name = argument.name
    flags = [f"--{name}", *([f"--{name.replace('_', '-')}"] if "_" in name else []), *argument.aliases]
    kinds = argument.kinds - {"None", "other"}
    if argument.choices:
        parser.add_argument(
            *flags, dest=name, type=lambda text: _choice(text, argument.choices), choices=argument.choices
        )
    elif "bool" in kinds:
        parser.add_argument(*flags, dest=name, type=_truth, nargs="?", const=True)
        if True in argument.defaults:
            parser.add_argument(f"--no_{name}", f"--no-{name.replace('_', '-')}", dest=name, action="store_false")
    elif kinds == {"list"}:
        parser.add_argument(*flags, dest=name, nargs="+")
    elif kinds in ({"int"}, {"float"}):
        parser.add_argument(*flags, dest=name, type=int if kinds == {"int"} else float)
    else:
        parser.add_argument(*flags, dest=name)


def _choice(text: str, choices: tuple[Any, ...]) -> Any:
    return next((choice for choice in choices if str(choice) == text), text)


def _truth(text: str) -> bool:
    if text.lower() in {"yes", "true", "t", "y", "1"}:
        return True
    if text.lower() in {"no", "false", "f", "n", "0"}:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
