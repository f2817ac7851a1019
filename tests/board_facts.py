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


new = configs.NewBoard()
functions = new.blocks.fns.values()
refresh = next(item.fn for item in functions if getattr(item.fn, "__name__", "") == "refresh")
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
            "ours": [name for name in new.tab if name.startswith(adapter.OURS)],
            "without_element": sorted(
                identifier for identifier in fields.ELEMENTS.values() if identifier not in new.elements
            ),
            "seconds": seconds,
            "bound": len(list(functions)),
        }
    ),
    file=sys.stdout,
)
