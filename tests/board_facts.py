"""Builds LLaMA-Board without a browser, lets it take every preset, and prints what comes of it as JSON.

    python tests/board_facts.py [CARD]

The handler of the memory panel is timed for the card.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from llamafactory.webui import common

from llamafactory_preflight import presets
from llamafactory_preflight.board import actions as actions_module
from llamafactory_preflight.board import adapter, configs, fields, place


CARD = sys.argv[1]
ROUNDS = 3
REQUEST = SimpleNamespace(session_hash="a page")


def panel_seconds(data: dict[Any, Any]) -> float:
    """CPU time of the whole handler, when what it keeps is kept."""
    refresh(data, REQUEST)
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        shown = refresh(data, REQUEST)
        times.append(time.process_time() - began)
    assert 'class="bar"' in shown[actions.ours["panel"]]["value"]
    return median(times)


def overlapping(data: dict[Any, Any]) -> dict[str, str | None]:
    """What the panel is told of two questions, where the second comes while the first one is looked at."""
    told: dict[str, str | None] = {}
    looks = actions_module.look

    def meanwhile(*given: Any, **named: Any) -> Any:
        actions_module.look = looks
        told["second"] = text(refresh(data, REQUEST))
        return looks(*given, **named)

    actions_module.look = meanwhile
    told["first"] = text(refresh(data | {actions.ours["num_cards"]: "several"}, REQUEST))
    told["again"] = text(refresh_again(REQUEST))
    told["once more"] = text(refresh_again(REQUEST))
    return told


def text(updates: dict[Any, Any]) -> str | None:
    return updates[actions.ours["panel"]].get("value")


new = configs.NewBoard()
functions = new.blocks.fns.values()
named = {getattr(item.fn, "__name__", ""): item.fn for item in functions}
refresh, refresh_again = named["refresh"], named["refresh_again"]
actions = refresh.__self__
runs, unplaced, seconds = {}, {}, {}
for preset in presets.available():
    arguments = presets.with_absolute_paths(preset)
    placement = place.preset(new.board, arguments, new.values)
    unplaced[preset.name] = placement.unplaced
    data = {element: placement.values[name] for name, element in new.elements.items()}
    parsed = new.engine.runner._parse_train_args(data)
    parsed["output_dir"] = placement.values[fields.OUTPUT_DIR]
    runs[preset.name] = {"wanted": arguments, "parsed": parsed, "sent": common._clean_cmd(parsed)}
    cards = {actions.ours["card"]: CARD, actions.ours["num_cards"]: str(preset.num_gpus)}
    seconds[preset.name] = panel_seconds(data | cards)
print(
    json.dumps(
        {
            "unplaced": unplaced,
            "runs": runs,
            "ids": [name for name in new.engine.manager._id_to_elem if adapter.OURS not in name],
            "ours": [name for name in new.tab if name.startswith(adapter.OURS)],
            "without_element": sorted(
                identifier for identifier in fields.ELEMENTS.values() if identifier not in new.elements
            ),
            "seconds": seconds,
            "overlapping": overlapping(data | cards),
            "bound": len(list(functions)),
        }
    ),
    file=sys.stdout,
)
