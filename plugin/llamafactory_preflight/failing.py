"""Hooks fail open: whatever goes wrong in a step of ours is one line, and LLaMA-Factory goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from llamafactory_preflight import handoff


_T = TypeVar("_T")


def fail_open(step: Callable[[], _T], otherwise: _T) -> _T:
    """Runs a step unless the plugin is off. Only a verdict, which is a SystemExit, stops the training."""
    collects = gc.isenabled()
    gc.disable()  # torch has made so many objects that one collection takes longer than the step
    try:
        from llamafactory_preflight.errors import UserError
        from llamafactory_preflight.settings import Settings

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
