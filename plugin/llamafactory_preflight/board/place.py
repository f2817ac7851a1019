"""Puts arguments into the board: into its fields, and into the extra arguments what no field can hold.

Whether they arrive is not deduced but tried: the board's own code turns the filled fields into arguments again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.arguments import schema
from llamafactory_preflight.board import fields
from llamafactory_preflight.board.fields import Element
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


Values = dict[str, Any]
"""What every element of the board holds, by its identifier."""

# What the board adds to every run as it sees fit, whatever the default of LLaMA-Factory.
ADDITIONS = frozenset(
    {
        "do_train", "cache_dir", "preprocessing_num_workers", "trust_remote_code", "plot_loss", "ddp_timeout",
        "include_num_input_tokens_seen", "output_dir", "model_name_or_path", "template", "dataset", "dataset_dir",
        "double_quantization", "quantization_method",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The board as far as filling it needs.

    Attributes:
        elements: What each element can hold, by its identifier.
        stages: The board's name of each training stage.
        models: The board's name of each model, by its path on the hub in use.
        parse: The board's own way from what its elements hold to arguments.
    """

    elements: Mapping[str, Element]
    stages: Mapping[str, str]
    models: Mapping[str, str]
    parse: Callable[[Values], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where arguments went.

    Attributes:
        values: What every element holds now.
        unplaced: Arguments that the board cannot be told.
    """

    values: Values
    unplaced: tuple[str, ...]


def preset(board: Board, arguments: Mapping[str, Any], current: Values) -> Placement:
    """Fills in a whole run: what it does not set gets LLaMA-Factory's default, as if the file were trained."""
    start = current | {fields.EXTRA: "{}"}
    for element, (nothing, _) in fields.GROUPS.items():
        start[element] = nothing
    placed = _placed(board, arguments, start, base={})
    wanted = dict(arguments) | _defaults(board.parse(placed), arguments)
    return _corrected(board, wanted, _placed(board, wanted, start, base={}))


def change(board: Board, arguments: Mapping[str, Any], current: Values) -> Placement:
    """Changes a few arguments and leaves everything else as it is."""
    base = board.parse(current)
    return _corrected(board, arguments, _placed(board, arguments, current, base=base))


def extra_of(values: Values) -> dict[str, Any]:
    """The extra arguments.

    Raises:
        UserError: They are no JSON object.
    """
    try:
        loaded = json.loads(values.get(fields.EXTRA) or "{}")
    except ValueError as error:
        raise UserError(phrase("The extra arguments are no JSON: {error}", error=error)) from None
    if not isinstance(loaded, dict):
        example = phrase("Write them like {example}", example='{"optim": "adamw_torch"}')
        raise UserError("The extra arguments are no JSON object", next_step=example)
    return loaded


def _placed(board: Board, wanted: Mapping[str, Any], current: Values, *, base: Mapping[str, Any]) -> Values:
    values, extra = dict(current), extra_of(current)
    for name, value in wanted.items():
        held = _held(board, name, value)
        if held:
            values |= held
            extra.pop(name, None)
    for element, table in ((fields.COMPUTE, fields.COMPUTE_TYPES), (fields.BOOSTER, fields.BOOSTERS)):
        names = next(iter(table.values()))
        if not base or names.keys() & wanted.keys():
            values[element] = fields.standing_for(table, {**base, **wanted} if base else _with_defaults(wanted, names))
            for name in names.keys() & wanted.keys():
                extra.pop(name, None)
    values[fields.EXTRA] = _as_json(extra)
    return values


def _held(board: Board, name: str, value: Any) -> Values:
    """The elements that hold one argument alone, with what they then show; none where none can."""
    if name == "stage":
        return {fields.STAGE: board.stages[value]} if value in board.stages else {}
    identifier = fields.ELEMENTS.get(name, "")
    element = board.elements.get(identifier)
    shown = element.shown(value) if element else None
    if shown is None:
        return {}
    held = {identifier: shown[0]}
    if identifier == fields.MODEL_PATH:
        held[fields.MODEL_NAME] = board.models.get(str(value), fields.CUSTOM_MODEL)
    return held


def _corrected(board: Board, wanted: Mapping[str, Any], values: Values) -> Placement:
    """Moves to the extra arguments whatever did not arrive through a field, and tries again."""
    lost = _lost(board, wanted, values)
    extra = extra_of(values)
    for element, (nothing, names) in fields.GROUPS.items():
        if lost & set(names):
            values[element] = nothing
            lost |= {name for name in names if name in wanted}
    extra |= {name: value for name, value in wanted.items() if name in lost}
    values[fields.EXTRA] = _as_json(extra)
    return Placement(values=values, unplaced=tuple(sorted(_lost(board, wanted, values))))


def _lost(board: Board, wanted: Mapping[str, Any], values: Values) -> set[str]:
    arrived = board.parse(values)
    return {name for name, value in wanted.items() if not fields.same(arrived.get(name), value)}


def _defaults(sent: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's defaults of what the board would send otherwise, though the preset does not say so."""
    known = schema.load()
    found: dict[str, Any] = {}
    for name, value in sent.items():
        if name in arguments or name in ADDITIONS:
            continue
        defaults = known.arguments[name].defaults if known and name in known.arguments else ()
        if name == "lora_alpha":
            defaults = (2 * sent["lora_rank"],)  # llamafactory/hparams/finetuning_args.py
        elif name == "packing":
            defaults = (bool(sent.get("neat_packing")) or sent.get("stage") == "pt",)  # hparams/data_args.py
        if len(defaults) == 1 and not fields.same(value, defaults[0]) and (value or defaults[0]):
            found[name] = defaults[0]
    return found


def _with_defaults(wanted: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    nothing = {name: "auto" if name == "flash_attn" else False for name in names}
    return nothing | {name: wanted[name] for name in names if name in wanted}


def _as_json(extra: Mapping[str, Any]) -> str:
    return json.dumps(extra, ensure_ascii=False)
