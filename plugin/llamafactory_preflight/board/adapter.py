"""LLaMA-Board's own elements and code in the terms of `place`: what each element can hold, and what they amount to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gradio as gr
from llamafactory.extras.constants import SUPPORTED_MODELS, TRAINING_STAGES, DownloadSource
from llamafactory.webui import common
from llamafactory.webui.locales import LOCALES

from llamafactory_preflight.board import fields, place
from llamafactory_preflight.board.fields import Element
from llamafactory_preflight.board.place import Board, Values
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


# Elements of the tab that say something or that belong to the page, and describe no training.
NO_ARGUMENTS = frozenset({"train.current_time", "train.device_count", "train.resume_btn", "train.progress_bar"})
# Those above the tabs that do; `top.hub_name` is not among the board's inputs of a training.
ABOVE = ("lang", "model_name", "model_path", "finetuning_type", "checkpoint_path", "quantization_bit",
         "quantization_method", "template", "rope_scaling", "booster")  # fmt: skip
OURS = "preflight_"
FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError)
Elements = Mapping[str, Any]
"""Elements of gradio by the board's identifier."""


def inputs(base: Elements, tab: Elements) -> dict[str, Any]:
    """The elements that describe a training: those above the tabs and those of the Train tab, by identifier."""
    in_tab = {f"train.{name}": element for name, element in tab.items() if not name.startswith(OURS)}
    every = {**{name: base[name] for name in (f"top.{name}" for name in ABOVE)}, **in_tab}
    kinds = (gr.Dropdown, gr.Textbox, gr.Slider, gr.Checkbox)
    return {name: item for name, item in every.items() if isinstance(item, kinds) and name not in NO_ARGUMENTS}


def board(engine: Any, elements: Elements) -> Board:
    """The board for `place`."""
    models: dict[str, str] = {}
    for name, paths in SUPPORTED_MODELS.items():
        models.setdefault(paths.get(DownloadSource.DEFAULT, ""), name)
    return Board(
        elements={name: _described(element) for name, element in elements.items()},
        stages={stage: name for name, stage in TRAINING_STAGES.items()},
        models=models,
        parse=lambda values: parse(engine, elements, values),
    )


def parse(engine: Any, elements: Elements, values: Values) -> dict[str, Any]:
    """The arguments that the board makes of what its elements hold, before it drops those that are false.

    Raises:
        UserError: Something in a field makes no sense.
    """
    place.extra_of(values)
    output_dir = str(values.get(fields.OUTPUT_DIR) or "")
    # The board warns of a path in this field whenever it is asked.
    name = os.path.basename(output_dir.rstrip(os.sep)) or "run"
    known = values | {fields.OUTPUT_DIR: name, fields.MODEL_NAME: values.get(fields.MODEL_NAME) or fields.CUSTOM_MODEL}
    known[fields.DATASET] = values.get(fields.DATASET) or []
    try:
        arguments = _parsed(engine, elements, known)
    except FAULTS as error:
        raise _unreadable(engine, elements, known, error) from None
    if os.sep in output_dir:
        arguments["output_dir"] = output_dir
    return arguments


def label(identifier: str, lang: str | None) -> str:
    """What the board calls an element in one of its languages."""
    name = identifier.partition(".")[2]
    return str(LOCALES.get(name, {}).get(lang or "en", {}).get("label", name))


def as_sent(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the training will be given."""
    return dict(common._clean_cmd(arguments))


def _parsed(engine: Any, elements: Elements, values: Values) -> dict[str, Any]:
    return dict(engine.runner._parse_train_args({element: values[name] for name, element in elements.items()}))


def _unreadable(engine: Any, elements: Elements, values: Values, error: Exception) -> UserError:
    """Names the text that makes the board's own code fail: without it, and only then, the code gets through."""
    for name, element in elements.items():
        if isinstance(element, gr.Textbox) and values[name] != element.value:
            with suppress(*FAULTS):
                _parsed(engine, elements, values | {name: element.value})
                field = label(name, values.get("top.lang"))
                return UserError(phrase("{field}: {value} cannot be read", field=field, value=repr(values[name])))
    return UserError(phrase("A field cannot be read: {error}", error=error))


def _described(element: Any) -> Element:
    if isinstance(element, gr.Checkbox):
        return Element(kind="checkbox", value=element.value)
    if isinstance(element, gr.Slider):
        return Element(
            kind="slider",
            value=element.value,
            minimum=element.minimum,
            maximum=element.maximum,
            whole=float(element.step).is_integer(),
        )
    if isinstance(element, gr.Dropdown):
        return Element(
            kind="menu",
            value=element.value,
            choices=tuple(value for _, value in element.choices),
            custom=bool(element.allow_custom_value),
            several=bool(element.multiselect),
        )
    return Element(kind="text", value=element.value)
