"""Hooks fail open: whatever goes wrong in a step of ours is one line, and LLaMA-Factory goes on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TypeVar

from llamafactory_preflight import handoff


_T = TypeVar("_T")


def unset_faulty_switches() -> None:
    """A switch with a value that does not exist turns off nothing else: it is told, and counts as not set."""
    from llamafactory_preflight.settings import unset_faulty

    for fault in unset_faulty(os.environ):
        handoff.warn_once(f"{fault} For now it counts as not set.")


def fail_open(step: Callable[[], _T], otherwise: _T) -> _T:
    """Runs a step unless the plugin is off. Only a verdict, which is a SystemExit, stops the training."""
    collects = gc.isenabled()
    gc.disable()  # torch has made so many objects that one collection takes longer than the step
    try:
        from llamafactory_preflight.errors import UserError
        from llamafactory_preflight.settings import Settings

        unset_faulty_switches()
        try:
            if Settings.from_environment().mode != "off":
                return step()
        except UserError as error:
            handoff.warn_once(str(error))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        handoff.warn_once(f"a step failed and is left out ({reason})")
    finally:
        if collects:
            gc.enable()
    return otherwise
