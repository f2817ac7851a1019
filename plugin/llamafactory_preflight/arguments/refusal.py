"""Ends a training with one message where a mistake of the user's is certain to end it anyway, with a traceback.

Certain is what LLaMA-Factory has refused already, or what its own reader cannot get past. Whatever it may accept goes
on, with a line on what looks wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from llamafactory_preflight.errors import Refused, UserError, words
from llamafactory_preflight.settings import is_enabled


REFUSALS = (ValueError, AssertionError, ImportError, OSError)
"""What LLaMA-Factory's parser raises for arguments that it does not take; of others a traceback may be wanted."""
NOTE_VARIABLE = "LLAMAFACTORY_PREFLIGHT_REFUSED"
OF_VALUES = (ArithmeticError, LookupError, NotImplementedError, StopIteration, TypeError, ValueError)
"""What arguments of a wrong value or type end with, deep in a library."""
_fault: list[UserError] = []
_refused: list[Exception] = []


def end(message: str) -> NoReturn:
    """Ends the process with a message on standard error and exit code 1.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(f"llamafactory-preflight: {message}") from None


def is_certain(error: UserError, names: Collection[str], accepted: Callable[[], Collection[str]]) -> bool:
    """Whether LLaMA-Factory would end with a mistake too.

    Args:
        error: What we found.
        names: Those of the arguments that a file and its overrides set.
        accepted: Gives the names of LLaMA-Factory's arguments, from its own classes; that takes seconds.
    """
    if isinstance(error, Refused):
        return True
    # Megatron's arguments are another class.
    takes_any = is_enabled(os.environ, "ALLOW_EXTRA_ARGS") or is_enabled(os.environ, "USE_MCA")
    return bool(names) and not takes_any and not set(names) <= set(accepted())


def try_json(command: list[str], read: Callable[[], object]) -> None:
    """Has LLaMA-Factory read a JSON file: 0.9.5 hands a path to `json.load`, which takes an open file.

    Args:
        command: What stands behind `llamafactory-cli train`.
        read: LLaMA-Factory's reader, which looks for the file in `sys.argv`.

    Raises:
        Refused: It cannot.
    """
    if not command or not command[0].endswith(".json") or not os.path.isfile(command[0]):
        return
    given, sys.argv = sys.argv, [sys.argv[0], *command]  # as its launcher leaves them
    try:
        read()
    except AttributeError:
        what = "This LLaMA-Factory cannot read .json files"
        raise Refused(what, where=command[0], next_step="Rename it to .yaml, as JSON is YAML too") from None
    finally:
        sys.argv = given


def remember_fault(error: UserError) -> None:
    """Keeps what looked wrong and was only said, for the moment when LLaMA-Factory fails."""
    _fault[:] = [error]


def remember_refused(error: Exception) -> None:
    """Keeps what LLaMA-Factory's parser raised, so that it is told from a failure later on."""
    _refused[:] = [error]


def open_note() -> Path:
    """Makes a file in which a rank can say why LLaMA-Factory refuses its arguments; children find it by a variable."""
    handle, name = tempfile.mkstemp(prefix="llamafactory-preflight-")
    os.close(handle)
    os.environ[NOTE_VARIABLE] = name
    return Path(name)


def close_note(note: Path) -> None:
    """Removes it."""
    os.environ.pop(NOTE_VARIABLE, None)
    note.unlink(missing_ok=True)


def end_rank(error: Exception) -> None:
    """Ends a rank without a traceback where LLaMA-Factory's parser refuses its arguments, with a note for the parent.

    Raises:
        SystemExit: It does, and torchrun has started this process on behalf of `llamafactory-cli train`.
    """
    note, said = os.environ.get(NOTE_VARIABLE), _said(error)
    if note and said and isinstance(error, REFUSALS) and "LOCAL_WORLD_SIZE" in os.environ:
        Path(note).write_text(said, encoding="utf-8")  # the same for every rank
        raise SystemExit(1) from None


def end_with(error: Exception, note: Path | None) -> None:
    """Ends with one message instead of a traceback where LLaMA-Factory has failed for a mistake of the user's.

    Raises:
        SystemExit: It has.
    """
    noted = note.read_text(encoding="utf-8") if note else ""
    by_parser = bool(noted) or any(error is refused for refused in _refused)
    said = noted or _said(error)
    if _fault and (by_parser or isinstance(error, OF_VALUES)):
        kind = "" if noted else f"{type(error).__name__}: "
        end(f"LLaMA-Factory has failed ({kind}{said}), most likely for this: {_fault[0]}")
    if by_parser and said and (noted or isinstance(error, REFUSALS)):
        end(f"LLaMA-Factory refuses these arguments: {said}.")


def _said(error: Exception) -> str:
    return words(error).rstrip(".")
