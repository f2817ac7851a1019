"""Builds LLaMA-Board without a browser, lets it take every preset, and prints what comes of it as JSON."""

from __future__ import annotations

import json
import sys

from llamafactory.webui import common

from llamafactory_preflight import presets
from llamafactory_preflight.board import adapter, configs, fields, place


new = configs.NewBoard()
runs, unplaced = {}, {}
for preset in presets.available():
    arguments = presets.with_absolute_paths(preset)
    placement = place.preset(new.board, arguments, new.values)
    unplaced[preset.name] = placement.unplaced
    data = {element: placement.values[name] for name, element in new.elements.items()}
    parsed = new.engine.runner._parse_train_args(data)
    parsed["output_dir"] = placement.values[fields.OUTPUT_DIR]
    runs[preset.name] = {"wanted": arguments, "parsed": parsed, "sent": common._clean_cmd(parsed)}
functions = new.blocks.fns.values() if hasattr(new.blocks, "fns") else new.blocks.dependencies
print(
    json.dumps(
        {
            "unplaced": unplaced,
            "runs": runs,
            "ours": [name for name in new.tab if name.startswith(adapter.OURS)],
            "without_element": sorted(
                identifier for identifier in fields.ELEMENTS.values() if identifier not in new.elements
            ),
            "bound": len(list(functions)),
        }
    ),
    file=sys.stdout,
)
