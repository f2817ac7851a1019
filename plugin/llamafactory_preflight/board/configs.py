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


class NewBoard:
    """LLaMA-Factory's board as it opens, without a server.

    Attributes:
        engine: LLaMA-Factory's engine.
        blocks: The page.
        tab: Elements of the tab for training, by name.
        elements: All elements that take input, by identifier.
        board: The same for `place`.
        values: What each element holds at first.
    """

    def __init__(self) -> None:
        self.engine = Engine(demo_mode=True)  # otherwise it would write files of its own
        with gr.Blocks() as self.blocks:
            above = create_top()
            self.engine.manager.add_elems("top", above)
            self.tab = create_train_tab(self.engine)
            self.engine.manager.add_elems("train", self.tab)
        self.elements = adapter.inputs({f"top.{name}": element for name, element in above.items()}, self.tab)
        self.board = adapter.board(self.engine, self.elements)
        self.values = {name: element.value for name, element in self.elements.items()}


def copy(chosen: list[Preset], folder: Path, *, force: bool) -> list[Path]:
    """Writes presets where a board that is started in `folder` looks for configs.

    Returns:
        The files.

    Raises:
        UserError: Another file stands in the way and `force` is off, or the folder cannot be written.
    """
    new = NewBoard()
    contents: dict[Path, bytes] = {}
    for preset in chosen:
        values = place.preset(new.board, presets.with_absolute_paths(preset), new.values).values
        kept = {name: value for name, value in values.items() if name not in LEFT_OUT}
        text = yaml.safe_dump(kept, allow_unicode=True)
        contents[folder / DEFAULT_CONFIG_DIR / f"{preset.name}.yaml"] = text.encode()
    return presets.put(contents, folder, force=force)
