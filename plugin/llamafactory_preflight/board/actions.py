"""What happens on the page: each method answers one event with updates of elements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import gradio as gr

from llamafactory_preflight import handoff, report
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.board import adapter, fields, menu, panel, place, session, template_check
from llamafactory_preflight.board.look import MODELS, look
from llamafactory_preflight.board.place import Placement, Values
from llamafactory_preflight.board.session import Change, Session, View
from llamafactory_preflight.board.words import say
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.presets import Preset, with_absolute_paths


Data = Mapping[Any, Any]
Updates = dict[Any, Any]
RECORD = "preflight.json"


class Actions:
    """The handlers of one board.

    Args:
        engine: LLaMA-Board's.
        inputs: Its elements that describe a training, by identifier.
        ours: The elements that the plugin added, by name.
        presets: The presets of the menu.
    """

    def __init__(
        self, engine: Any, inputs: Mapping[str, Any], ours: Mapping[str, Any], presets: tuple[Preset, ...]
    ) -> None:
        self.engine = engine
        self.inputs = inputs
        self.ours = ours
        self.presets = presets
        self.board = adapter.board(engine, inputs)

    def tier(self, tier: str) -> Any:
        """Another tier: its presets."""
        return gr.update(choices=menu.of_tier(self.presets, tier), value=None)

    def fill(self, data: Data, request: gr.Request) -> Updates:
        """A preset was chosen."""
        current, values = session.of(request), self._values(data)
        chosen = next((preset for preset in self.presets if preset.name == data[self.ours["preset"]]), None)
        if chosen is None:
            return self._nothing()
        own = _own(values, current) if data[self.ours["keep"]] else set()
        arguments = {name: value for name, value in with_absolute_paths(chosen).items() if name not in own}
        arguments |= _data_folder(arguments)
        try:
            placement = place.preset(self.board, arguments, values)
        except UserError as error:
            return self._told(panel.message("faulty", self._lang(data), error.text))
        last = current.changes[-1:]
        updates = self._applied(placement, values, current, self._lang(data))
        if last:  # chosen in haste, before the page had got that
            current.expect(placement.values, last[0].after)
            updates |= {self.inputs[name]: gr.update(value=placement.values[name]) for name in last[0].changed}
        current.written = frozenset(arguments)
        if menu.card(data[self.ours["card"]]):
            updates[self.ours["num_cards"]] = gr.update(value=str(chosen.num_gpus))
        watched = (fields.MODEL_NAME, fields.MODEL_PATH, fields.DATASET)
        current.chosen |= {name: placement.values[name] for name in watched if placement.values[name] != values[name]}
        return updates

    def remedy(self, number: int, data: Data, request: gr.Request) -> Updates:
        """A remedy was pressed."""
        current, values = session.of(request), self._values(data)
        if number >= len(current.view.remedies):
            return self._nothing()
        try:
            placement = place.change(self.board, current.view.remedies[number], values)
        except UserError as error:
            return self._told(panel.message("faulty", self._lang(data), error.text))
        return self._applied(placement, values, current, self._lang(data))

    def use_template(self, data: Data, request: gr.Request) -> Updates:
        """The right template was asked for."""
        current, values = session.of(request), self._values(data)
        found = template_check.match(values[fields.MODEL_NAME], values[fields.MODEL_PATH])
        if found.template is None:
            return self._nothing()
        placement = Placement(values=values | {fields.TEMPLATE: found.template}, unplaced=())
        return self._applied(placement, values, current, self._lang(data))

    def undo(self, data: Data, request: gr.Request) -> Updates:
        """The last preset, remedy or template is taken back; what else was edited since stays."""
        current, values = session.of(request), self._values(data)
        if not current.changes:
            return self._nothing()
        change = current.changes.pop()
        restored = {name: before for name, (before, _) in change.changed.items()}
        current.expect(values | restored, values)
        current.written = change.written
        return {
            **{self.inputs[name]: gr.update(value=value) for name, value in restored.items()},
            **self._told(panel.page(f"<p>{escape(say('undone', self._lang(data)))}</p>")),
            self.ours["undo"]: gr.update(visible=bool(current.changes)),
            self.ours["preset"]: gr.update(value=None),
        }

    def refresh(self, data: Data, request: gr.Request) -> Updates:
        """Something changed: the memory panel and the template check."""
        current = session.of(request)
        view = current.view = View(data=data)
        return self._refreshed(view, current, proposes=False)

    def refresh_again(self, request: gr.Request) -> Updates:
        """After `refresh`: the same once more with what takes longer, the hub's answer and the remedies.

        It looks at what was last seen, not at the page, which may hold something else by now.
        """
        current = session.of(request)
        view = current.view
        if not view.is_unfinished:
            return {self.ours["panel"]: gr.update()}
        view.is_unfinished = False
        MODELS.wait(lambda: current.view is view)
        return self._refreshed(view, current, proposes=True)

    def _refreshed(self, view: View, current: Session, *, proposes: bool) -> Updates:
        values, lang = self._values(view.data), self._lang(view.data)
        buttons: list[str] = []
        is_unfinished = False
        try:
            shown, buttons, is_unfinished = self._looked(values, view, proposes=proposes)
        except UserError as error:
            shown = panel.message("faulty", lang, error.text)
        except Exception as error:
            handoff.warn_once(f"the memory panel has a fault ({type(error).__name__}: {error})")
            shown = panel.message("fault", lang)
        last = current.changes[-1:]
        updates = {
            self.ours["panel"]: gr.update(value=shown),
            self.ours["remedies_box"]: gr.update(visible=bool(buttons)),
            self.ours["remedies_title"]: gr.update(value=panel.page(f"<p>{escape(_offer(buttons, lang))}</p>")),
            **{
                button: gr.update(visible=bool(text), value=text)
                for button, text in zip_longest(self.ours["remedies"], buttons, fillvalue="")
            },
            self.ours["changes"]: gr.update(value=_as_table(last[0], lang)) if last else gr.update(),
            **self._template(values, lang),
        }
        if current.view is not view:  # asked again meanwhile, and that answer may be there already
            return {self.ours["panel"]: gr.update()}
        view.is_unfinished = is_unfinished
        return updates

    def sample_soon(self, lang: str) -> Any:
        """A sample was asked for."""
        return gr.update(value=panel.page(f"<p>{escape(say('sample_waiting', lang))}</p>"), visible=True)

    def sample(self, data: Data) -> Any:
        """The first sample with its loss mask."""
        lang = self._lang(data)
        try:
            arguments = adapter.as_sent(self.board.parse(self._values(data)))
            return gr.update(value=template_check.sample(arguments, lang))
        except UserError as error:
            return gr.update(value=panel.message("faulty", lang, error.text))

    def measured(self, data: Data) -> Any:
        """The output box changed: what a training that has ended took, beside what was predicted."""
        values = self._values(data)
        if self.engine.runner.running or not values.get(fields.OUTPUT_DIR):
            return gr.update()
        try:
            folder = self.board.parse(values)["output_dir"]
            loaded = json.loads(Path(folder, RECORD).read_text(encoding="utf-8"))
            text = _measured(loaded["prediction"], loaded["measurement"], self._lang(data))
        except (UserError, OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return gr.update(visible=False)
        return gr.update(value=panel.page(f"<p>{escape(text)}</p>"), visible=True)

    def _looked(self, values: Values, view: View, *, proposes: bool) -> tuple[str, list[str], bool]:
        data, lang = view.data, self._lang(view.data)
        if not values[fields.MODEL_PATH]:
            return panel.message("no_model", lang), [], False
        arguments = adapter.as_sent(self.board.parse(values))
        card, num_cards = menu.card(data[self.ours["card"]]), data[self.ours["num_cards"]]
        looked = look(arguments, card=card, num_cards=num_cards, proposes=proposes)
        if looked.asking:
            return panel.message("asking", lang), [], True
        proposed = looked.result.remedies[: len(self.ours["remedies"])]
        view.remedies = tuple(remedy.set for remedy in proposed)
        buttons = [panel.remedy(remedy, lang) for remedy in proposed]
        return panel.panel(looked.result, lang, proposes=proposes), buttons, looked.may_have_remedies and not proposes

    def _template(self, values: Values, lang: str | None) -> Updates:
        given, said, button = str(values[fields.TEMPLATE]), self.ours["template_words"], self.ours["template_use"]
        if not values[fields.MODEL_PATH]:
            return {said: gr.update(value=""), button: gr.update(visible=False)}
        found = template_check.match(values[fields.MODEL_NAME], values[fields.MODEL_PATH])
        wrong = found.template is not None and found.template != given
        return {
            said: gr.update(value=template_check.words(found, given, lang)),
            button: gr.update(visible=wrong, value=say("template_use", lang, template=found.template)),
        }

    def _applied(self, placement: Placement, values: Values, current: Session, lang: str | None) -> Updates:
        change = Change(before=values, after=placement.values, written=current.written, unplaced=placement.unplaced)
        current.changes.append(change)
        current.expect(placement.values, values)
        return {
            **{self.inputs[name]: gr.update(value=value) for name, (_, value) in change.changed.items()},
            **self._told(_as_table(change, lang)),
            self.ours["undo"]: gr.update(visible=True),
        }

    def _told(self, text: str) -> Updates:
        return {self.ours["changes"]: gr.update(value=text), self.ours["changes_row"]: gr.update(visible=True)}

    def _nothing(self) -> Updates:
        return {self.ours["changes"]: gr.update()}

    def _values(self, data: Data) -> Values:
        return {name: data[element] for name, element in self.inputs.items()}

    def _lang(self, data: Data) -> str:
        return data[self.inputs["top.lang"]] or "en"


def _offer(buttons: list[str], lang: str | None) -> str:
    return say("remedies" if len(buttons) > 1 else "only_remedy", lang)


def _own(values: Values, current: Session) -> set[str]:
    """Arguments of a preset that give way to what the user has chosen."""
    own: set[str] = set()
    model = (fields.MODEL_NAME, fields.MODEL_PATH)
    if values[fields.MODEL_PATH] and any(values[name] != current.chosen.get(name) for name in model):
        own |= {"model_name_or_path", "template", "output_dir"}
    if values[fields.DATASET] and values[fields.DATASET] != current.chosen.get(fields.DATASET):
        own |= {"dataset", "dataset_dir"}
    return own


def _data_folder(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Another folder where the one of that name has other data sets: the board would look into it in vain."""
    written = str(arguments.get("dataset_dir", "data"))
    if "dataset" not in arguments or not Path(written, paths.DATA_INFO).is_file():
        return {}
    return {"dataset_dir": paths.resolve(arguments, beside=None)[0].get("dataset_dir", written)}


def _as_table(change: Change, lang: str | None) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(adapter.label(name, lang))}</th><td>{_shown(before)} → {_shown(after)}</td></tr>'
        for name, (before, after) in change.changed.items()
    )
    summary = escape(say("changed", lang, num=len(change.changed)))
    table = f"<details><summary>{summary}</summary><table>{rows}</table></details>"
    lost = say("unplaced", lang, names=", ".join(change.unplaced)) if change.unplaced else ""
    return panel.page(table + (f'<p class="verdict tight">{escape(lost)}</p>' if lost else ""))


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return escape(text) if text not in ("", "None") else "–"


def _measured(predicted: Mapping[str, Any], measured: Mapping[str, Any], lang: str) -> str:
    on_gpu = measured["on_gpu"]
    foretold = predicted["peak_allocated_bytes"] if on_gpu else predicted["host_bytes"]
    found = measured["peak_allocated_bytes"] if on_gpu else measured["host_peak_bytes"]
    difference = f"{(found - foretold) / foretold:+.1%}"
    what = say("gpu_peak" if on_gpu else "main_memory", lang)
    sizes = {"predicted": report.size(foretold), "measured": report.size(found)}
    return say("measured", lang, what=what, **sizes, difference=difference)
