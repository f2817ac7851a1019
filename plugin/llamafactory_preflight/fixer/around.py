"""Wrappers for the hooks of the template fixer. Nothing else of it is imported here until one of them is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llamafactory_preflight import handoff
from llamafactory_preflight.failing import unset_faulty_switches


def repairing(step: str, *, after: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a wrapper that hands a call to the template fixer: instead of the original, or its result afterwards."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def repairing(*args: Any, **kwargs: Any) -> Any:
            if after:
                result = original(*args, **kwargs)
                return _repair(step, lambda *_args, **_kwargs: result, args, kwargs)
            return _repair(step, original, args, kwargs)

        return repairing

    return around


def _repair(step: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a step of the template fixer. Whatever goes wrong in it, the original is called, and called once."""
    results: list[Any] = []
    failures: list[BaseException] = []

    @functools.wraps(original)
    def once(*arguments: Any, **named: Any) -> Any:
        try:
            results.append(original(*arguments, **named))
        except BaseException as error:
            failures.append(error)
            raise
        return results[-1]

    try:
        from llamafactory_preflight.settings import Settings

        unset_faulty_switches()
        if Settings.from_environment().template != "off":
            from llamafactory_preflight.fixer import points

            return getattr(points, step)(once, args, kwargs)
    except Exception as error:
        if error in failures or (isinstance(error, ValueError) and type(error).__name__ == "UserError"):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        handoff.warn_once(f"a repair of the chat template failed and is left out ({reason})")
    return results[-1] if results else original(*args, **kwargs)
