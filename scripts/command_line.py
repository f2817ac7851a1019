"""What the scripts share where a user's words meet files: one message for a mistake, and nothing lost by one."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn


MARK = ".made-by-measure-scripts"
"""A file in every folder that scripts made for themselves, and may therefore delete from."""


def fail(message: str) -> NoReturn:
    """Ends a script with one message and exit code 2.

    Raises:
        SystemExit: Always.
    """
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def read_text(file: Path) -> str:
    """The text of a file that a user named, or the message on why there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        fail(f"{file} does not exist")
    except UnicodeDecodeError:
        fail(f"{file} is not UTF-8 text")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")


def read_mapping(file: Path) -> dict[str, Any]:
    """The JSON object in a file that a user named."""
    try:
        found = json.loads(read_text(file))
    except ValueError as error:
        fail(f"{file} is not JSON: {error}")
    return found if isinstance(found, dict) else fail(f"{file} holds no JSON object")


def read_rows(file: Path, *needed: str) -> list[dict[str, Any]]:
    """The JSON objects of a file that a user named, one a line, each of which has the needed keys."""
    rows = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            fail(f"{file}, line {number} is not JSON: {error}")
        missing = [key for key in needed if not isinstance(row, dict) or key not in row]
        if missing or not isinstance(row, dict):
            fail(f"{file}, line {number} is no row of results: it has no {', '.join(missing) or 'keys'}")
        rows.append(row)
    return rows


def rows_to_add_to(file: Path, *needed: str) -> list[dict[str, Any]]:
    """The rows of a file that gets more of them, asked for before a long run; none where it does not exist yet.

    What is no file of such rows is somebody's, and is left alone.
    """
    if not file.parent.is_dir():
        fail(f"{file.parent}, where {file.name} should be written, is not a folder")
    return read_rows(file, *needed) if file.exists() else []


def read_cases(file: Path) -> dict[str, Any]:
    """The models and cases that `measure_runs.py` describes; their names become those of files and folders."""
    plan = read_mapping(file)
    models, cases = plan.get("models"), plan.get("cases")
    if not isinstance(models, dict) or not isinstance(cases, list) or not cases:
        fail(f'{file} holds no {{"models": {{...}}, "cases": [...]}}')
    for number, case in enumerate(cases, 1):
        if not isinstance(case, dict) or not isinstance(case.get("args"), dict):
            fail(f'{file}, case {number} is no {{"id": ..., "model": ..., "args": {{...}}}}')
        if case.get("model") not in models:
            fail(f"{file}, case {number} names the model {case.get('model')!r}, which is not among its models")
        check_name(case.get("id"), f"{file}, case {number}")
    for name in models:
        check_name(name, f"{file}, a model")
    return plan


def check_name(name: object, where: str) -> None:
    """Refuses a name that would lead out of a folder."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
        fail(f"{where} is called {name!r}; letters, digits and . _ + - make a name")


def claim(folder: Path, variable: str) -> None:
    """Makes a folder for what scripts write and delete; one that holds something of others is refused.

    Args:
        folder: Its path.
        variable: The environment variable that chooses it.
    """
    chosen = variable in os.environ
    try:
        if chosen and folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
            fail(f"{folder} holds something else: let {variable} name a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        fail(f"{folder} cannot be written: {error.strerror}; let {variable} name another folder")


def write_whole(files: Iterable[tuple[Path, str]]) -> None:
    """Writes texts so that each file is the old one or the new one at any moment, whatever ends the script."""
    for file, text in files:
        target = file.resolve()
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, scratch)
            scratch.replace(target)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            fail(f"{file} cannot be written: {error.strerror}")


def accepts(usage: str | None, file: Path, parser: argparse.ArgumentParser | None = None) -> bool:
    """Reads the command line of a script that notes what it counted: whether it writes it over `file`."""
    parser = parser or argparse.ArgumentParser(description=(usage or "").splitlines()[0])
    parser.usage = (usage or "").partition("usage: ")[2].splitlines()[0]
    parser.add_argument("--accept", action="store_true", help=f"write {file.name} instead of printing it")
    return bool(parser.parse_args().accept)


def tell_record(file: Path, record: dict[str, Any], *, accept: bool) -> None:
    """Writes a record, or prints it where that was not asked for."""
    text = json.dumps(record, indent=1) + "\n"
    if accept:
        write_whole([(file, text)])
    else:
        print(text, end="")


def rank() -> tuple[int, int]:
    """This process's rank and the number of all, from the environment that a script's usage shows."""
    try:
        mine, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        fail("start every rank with RANK and WORLD_SIZE in its environment, as the usage (--help) shows")
    return (mine, world) if 0 <= mine < world else fail(f"RANK={mine} is not below WORLD_SIZE={world}")
