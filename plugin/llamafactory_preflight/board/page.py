"""Adds the plugin's elements to the Train tab and connects them with what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.layouts import Form
from llamafactory.webui.locales import LOCALES

from llamafactory_preflight import presets
from llamafactory_preflight.board import adapter, menu, panel, start
from llamafactory_preflight.board.actions import Actions
from llamafactory_preflight.board.labels import LABELS
from llamafactory_preflight.board.words import LANGUAGES
from llamafactory_preflight.presets import Preset


NUM_REMEDIES = 8
TICK, TOLD = "preflight-tick", "preflight-told"
# A preset changes dozens of elements at once, and gradio would ask the server for each of them.
DEBOUNCE = f"""() => {{
  clearTimeout(window.preflightTimer);
  window.preflightTimer = setTimeout(() => document.getElementById("{TICK}")?.click(), 100);
}}"""
# Before gradio 5 a Markdown reports a change whenever anything on the page is drawn again, also by the answer to it.
ONCE_TOLD = f"""(text) => {{
  if (text === window.preflightText) return;
  window.preflightText = text;
  document.getElementById("{TOLD}")?.click();
}}"""
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "show_api": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The elements of the plugin on one page.

    Attributes:
        engine: LLaMA-Board's.
        above: The board's elements above the tabs, by identifier.
        ours: The plugin's own elements, by name; `remedies` is a list of buttons.
        available: The presets of the menu.
    """

    engine: Any
    above: dict[str, Any]
    ours: dict[str, Any]
    available: tuple[Preset, ...]

    def connect(self, tab: dict[str, Any]) -> dict[str, Any]:
        """Connects everything, when the board has built its tab.

        Returns:
            The tab's elements, with those of ours that the board's language menu labels.
        """
        try:
            return self._connect(tab)
        except Exception:
            self.ours["frame"].visible = False
            raise

    def _connect(self, tab: dict[str, Any]) -> dict[str, Any]:
        ours, inputs = self.ours, adapter.inputs(self.above, tab)
        actions = Actions(self.engine, inputs, ours, self.available)
        every = {*inputs.values(), ours["preset"], ours["keep"], ours["card"], ours["num_cards"]}
        fills = [*inputs.values(), *(ours[name] for name in ("changes_row", "changes", "undo", "preset", "num_cards"))]
        told = ("panel", "remedies_box", "remedies_title", "changes", "template_words", "template_use")
        shows = [*(ours[name] for name in told), *ours["remedies"]]
        raw: dict[str, Any] = {**QUIET, "preprocess": False}  # also what a slider would refuse is to be judged

        # A menu that is used again before it was answered is answered for what it shows in the end.
        ours["tier"].input(actions.tier, [ours["tier"]], [ours["preset"]], trigger_mode="always_last", **QUIET)
        ours["preset"].input(actions.fill, every, fills, trigger_mode="always_last", **raw)
        ours["undo"].click(actions.undo, every, fills, **raw)
        ours["template_use"].click(actions.use_template, every, fills, **raw)
        for number, button in enumerate(ours["remedies"]):
            button.click(_remedy(actions, number), every, fills, **raw)
        watched = [item for name, item in inputs.items() if name not in ("train.config_path", "train.output_dir")]
        changes = [item.change for item in (*watched, ours["card"], ours["num_cards"])]
        gr.on(changes, None, js=DEBOUNCE, **QUIET)
        asked = ours["tick"].click(actions.refresh, every, shows, trigger_mode="always_last", **raw)
        # Once an answer, also while an earlier one is still looked for, which `Actions` will not show then.
        asked.then(actions.refresh_again, None, shows, trigger_mode="multiple", **QUIET)
        ours["sample"].click(actions.sample_soon, [inputs["top.lang"]], [ours["sample_view"]], **QUIET).then(
            actions.sample, every, [ours["sample_view"]], preprocess=False, show_progress="hidden", show_api=False
        )
        tab["output_box"].change(None, [tab["output_box"]], None, js=ONCE_TOLD, **QUIET)
        ours["told"].click(actions.measured, every, [ours["measured"]], trigger_mode="always_last", **raw)
        named = {name: ours[name.removeprefix(adapter.OURS)] for name in LABELS}
        return tab | named


def build(engine: Any) -> Page:
    """Creates what stands above the board's own elements of the tab, which is built next.

    Raises:
        LookupError: The board lacks something that this needs.
    """
    above = {f"top.{name}": engine.manager._id_to_elem.get(f"top.{name}") for name in adapter.ABOVE}
    missing = [name for name, element in above.items() if element is None]
    missing += [name for name in start.REPLACED if not callable(getattr(engine.runner, name, None))]
    if missing:
        raise LookupError(f"LLaMA-Board has no {', '.join(missing)}; it runs without presets and memory panel")
    available = tuple(presets.available())
    LOCALES.update(LABELS)
    for lang in LANGUAGES:
        LOCALES["preflight_card"][lang]["choices"] = menu.card_choices(lang)
    page = Page(engine=engine, above=above, ours=_elements(above["top.template"], available), available=available)
    start.install(engine)
    return page


def _elements(template: Any, available: tuple[Preset, ...]) -> dict[str, Any]:
    tier = menu.suggested(available, menu.here())
    ours: dict[str, Any] = {}
    with gr.Column(elem_id="preflight") as ours["frame"]:
        with gr.Row():
            ours["tier"] = gr.Dropdown(choices=menu.tiers(available), value=tier, scale=2, min_width=160)
            ours["preset"] = gr.Dropdown(choices=menu.of_tier(available, tier), value=None, scale=5, min_width=240)
            ours["keep"] = gr.Checkbox(value=True, scale=2, min_width=200)
        for name, identifier in (("tick", TICK), ("told", TOLD)):
            ours[name] = gr.Button("", elem_id=identifier)  # never seen: `panel.STYLE` hides it
        with gr.Row(visible=False) as ours["changes_row"]:
            with gr.Column(scale=6, min_width=200):
                ours["changes"] = gr.HTML(elem_id="preflight-changes")
            ours["undo"] = gr.Button(size="sm", scale=1, min_width=110)
        ours["panel"] = gr.HTML(panel.message("no_model", "en"), elem_id="preflight-panel")
        with gr.Column(elem_classes="preflight-remedies", visible=False) as ours["remedies_box"]:
            ours["remedies_title"] = gr.HTML()
            ours["remedies"] = [gr.Button(visible=False, size="sm") for _ in range(NUM_REMEDIES)]
        ours["measured"] = gr.HTML(visible=False)
        with gr.Row():
            cards = menu.card_choices()
            ours["card"] = gr.Dropdown(choices=cards, value=menu.HERE, allow_custom_value=True, scale=3, min_width=240)
            ours["num_cards"] = gr.Textbox(value="", placeholder="1", scale=1, min_width=110)
    # gradio has put the menus of the row into a form by now.
    row: Any = template.parent.parent if isinstance(template.parent, Form) else template.parent
    with row, gr.Column(min_width=200, scale=0):
        ours["template_words"] = gr.HTML()
        ours["template_use"] = gr.Button(visible=False, size="sm")
        ours["sample"] = gr.Button(size="sm")
    ours["sample_view"] = gr.HTML(visible=False)
    return ours


def _remedy(actions: Actions, number: int) -> Any:
    # Not a partial: gradio reads the annotations of the function to find out that it wants the request.
    def press(data: dict[Any, Any], request: gr.Request) -> Any:
        return actions.remedy(number, data, request)

    return press
