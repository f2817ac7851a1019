"""Wrappers for the hooks of LLaMA-Board. Nothing of the board or of gradio is imported before the board is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llamafactory_preflight.failing import fail_open


def create_train_tab(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds presets and the memory panel; a board that changed too much is left alone."""

    @functools.wraps(original)
    def create(engine: Any) -> Any:
        page = fail_open(functools.partial(_build, engine), None)
        tab = original(engine)
        return tab if page is None else fail_open(functools.partial(page.connect, tab), tab)

    return create


def keeping(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the wrapper for a function of the board that would undo what a preset filled in."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        return fail_open(functools.partial(_wrapped, name, original), original)

    return around


def _build(engine: Any) -> Any:
    from llamafactory_preflight.board import page

    return page.build(engine)


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    if len(inspect.signature(original).parameters) != 1:
        raise TypeError(f"LLaMA-Board's {name} takes other arguments than it did")
    from llamafactory_preflight.board import keep

    return keep.wrapper(name, original)
