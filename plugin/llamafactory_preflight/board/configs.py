"""Presets as files for LLaMA-Board's own config loader, with the elements that the installed version has."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import yaml
from llamafactory.webui.common import DEFAULT_CONFIG_DIR
from llamafactory.webui.components import create_top, create_train_tab
from llamafactory.webui.engine import Engine

from llamafactory_preflight import presets
from llamafactory_preflight.board import adapter, fields, place
from llamafactory_preflight.presets import Preset


# As the board leaves them out; unlike it, the path of a model that it does not know is kept.
LEFT_OUT = frozenset({"top.lang", "train.config_path", fields.OUTPUT_DIR})


def copy(chosen: list[Preset], folder: Path, *, force: bool) -> list[Path]:
    """Writes presets where a board that is started in `folder` looks for configs.

    Returns:
        The files.

    Raises:
        UserError: Another file stands in the way and `force` is off, or the folder cannot be written.
    """
    engine = Engine(demo_mode=True)  # otherwise it would write files of its own
    with gr.Blocks():
        above = create_top()
        engine.manager.add_elems("top", above)
        tab = create_train_tab(engine)
        engine.manager.add_elems("train", tab)
    elements = adapter.inputs({f"top.{name}": element for name, element in above.items()}, tab)
    board = adapter.board(engine, elements)
    new_page = {name: element.value for name, element in elements.items()}
    contents: dict[Path, bytes] = {}
    for preset in chosen:
        values = place.preset(board, presets.with_absolute_paths(preset), new_page).values
        kept = {name: value for name, value in values.items() if name not in LEFT_OUT}
        text = yaml.safe_dump(kept, allow_unicode=True)
        contents[folder / DEFAULT_CONFIG_DIR / f"{preset.name}.yaml"] = text.encode()
    return presets.put(contents, folder, force=force)
