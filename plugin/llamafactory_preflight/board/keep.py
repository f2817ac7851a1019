"""Keeps what a preset filled in: the board's own functions would overwrite some of it, and drop what is false."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from llamafactory_preflight.board import session


class Written(dict[Any, Any]):
    """Arguments, or what the elements hold, and which arguments the user or a preset wrote."""

    def __init__(self, values: Mapping[Any, Any], written: frozenset[str]) -> None:
        super().__init__(values)
        self.written = written


def wrapper(name: str, original: Callable[[Any], Any]) -> Callable[..., Any]:
    """Around one function of the board."""
    return _keeping_false(original) if name == "_clean_cmd" else _answering(name, original)


def _keeping_false(original: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The board leaves out what is false, as if that were every argument's default."""

    @functools.wraps(original)
    def clean(args: dict[str, Any]) -> dict[str, Any]:
        kept = original(args)
        written: frozenset[str] = getattr(args, "written", frozenset())
        return {name: value for name, value in args.items() if name in kept or (value is False and name in written)}

    return clean


def _answering(handler: str, original: Callable[[str], Any]) -> Callable[..., Any]:
    """The board overwrites the model's path and template, or the dataset, whenever the model or the stage changes.

    It cannot tell a user's hand from a preset, so while one is filled in, the answer is what the preset says.
    """

    def answer(value: str, request: gr.Request) -> Any:
        filled = session.of(request).answer(handler, value)
        return original(value) if filled is None else filled

    # Not all of it: gradio reads the parameters and their types of the wrapper to find out that it wants the request.
    signature = inspect.signature(answer)
    functools.update_wrapper(answer, original, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    answer.__annotations__ = {"value": str, "request": gr.Request}
    answer.__signature__ = signature  # type: ignore[attr-defined]
    return answer
