"""What changes about the board's Preview, Start and Load buttons."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from llamafactory.webui import common
from llamafactory.webui.locales import ALERTS

from llamafactory_preflight import handoff
from llamafactory_preflight.board import failure, panel, session
from llamafactory_preflight.board.keep import Written
from llamafactory_preflight.board.look import MODELS, look
from llamafactory_preflight.board.words import say
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.result import Result
from llamafactory_preflight.settings import PREFLIGHT_VARIABLE, Settings


Updates = dict[Any, Any]
OUTPUT = "failed_output.log"
REPLACED = ("_parse_train_args", "_initialize", "preview_train", "run_train", "load_args", "check_output_dir")


def install(engine: Any) -> None:
    """Replaces what the buttons of the Train tab will call; the tab is built after it."""
    runner = engine.runner
    runner._parse_train_args = partial(_parse, runner._parse_train_args, engine.manager)
    runner.preview_train = _preview(engine, runner.preview_train)
    runner.run_train = _start(engine, runner.run_train)
    load, check = runner.load_args, runner.check_output_dir

    def load_args(lang: str, config_path: str, request: gr.Request) -> Updates:
        return _expected(engine, load(lang, config_path), request)

    def check_output_dir(
        lang: str, model_name: str, finetuning_type: str, output_dir: str, request: gr.Request
    ) -> Updates:
        return _expected(engine, check(lang, model_name, finetuning_type, output_dir), request)

    runner.load_args, runner.check_output_dir = load_args, check_output_dir


def _expected(engine: Any, updates: Updates, request: Any) -> Updates:
    """Loading sets a model and a stage, too, after which the board would overwrite what was loaded."""
    session.of(request).expect({engine.manager.get_id_by_elem(element): value for element, value in updates.items()})
    return updates


def _parse(original: Callable[[Updates], dict[str, Any]], manager: Any, data: Updates) -> Written:
    extra = json.loads(data[manager.get_elem_by_id("train.extra_args")])
    return Written(original(data), getattr(data, "written", frozenset()) | frozenset(extra))


def _preview(engine: Any, original: Callable[[Updates], Iterator[Updates]]) -> Any:
    def preview_train(data: Updates, request: gr.Request) -> Iterator[Updates]:
        data = Written(data, session.of(request).written)
        box = engine.manager.get_elem_by_id("train.output_box")
        for updates in original(data):
            text = updates.get(box)
            if isinstance(text, str) and text.startswith("```bash"):
                updates[box] = f"{text}\n\n{_judged(engine, data)}"
            yield updates

    return preview_train


def _start(engine: Any, original: Callable[[Updates], Iterator[Updates]]) -> Any:
    runner = engine.runner

    def run_train(data: Updates, request: gr.Request) -> Iterator[Updates]:
        current = session.of(request)
        data = Written(data, current.written)
        lang = data[engine.manager.get_elem_by_id("top.lang")]
        box = engine.manager.get_elem_by_id("train.output_box")
        result = None
        if not runner.demo_mode and not runner._initialize(data, do_train=True, from_preview=True):
            result = _result(engine, data)
        confirmed = False
        if result is not None and result.verdict.word == "will_not_fit" and Settings.from_environment().mode != "warn":
            command = repr(sorted(runner._parse_train_args(data).items(), key=lambda item: item[0]))
            confirmed, current.asked = current.asked == command, command
            if not confirmed:
                gr.Warning(say("will_not_fit", lang))
                yield {box: f"{_markdown(result, lang)}\n\n{say('ask', lang)}"}
                return
        current.asked = ""
        steps = original(data)
        with _warning_only(confirmed):  # the training is started on the way to the first step
            first = next(steps, None)
        if first is not None:
            yield first
        for updates in steps:
            yield _shortened(runner, data, updates, box, lang)

    return run_train


@contextmanager
def _warning_only(confirmed: bool) -> Iterator[None]:
    """Lets a training that the user wants in spite of the verdict go on; it copies this process's environment."""
    before = os.environ.get(PREFLIGHT_VARIABLE)
    if confirmed:
        os.environ[PREFLIGHT_VARIABLE] = "warn"
    try:
        yield
    finally:
        if confirmed and before is None:
            os.environ.pop(PREFLIGHT_VARIABLE, None)
        elif confirmed and before is not None:
            os.environ[PREFLIGHT_VARIABLE] = before


def _shortened(runner: Any, data: Updates, updates: Updates, box: Any, lang: str) -> Updates:
    text = updates.get(box)
    if isinstance(text, str) and text.startswith(ALERTS["err_failed"][lang]) and "\n\n```\n" in text:
        heading, _, output = text.partition("\n\n```\n")
        output = output.rstrip().removesuffix("```")
        file = Path(runner._parse_train_args(data)["output_dir"], OUTPUT)
        written = False
        with suppress(OSError):
            written = bool(file.write_text(output, encoding="utf-8"))
        updates[box] = failure.short(heading, output, lang, file=str(file) if written else "")
    return updates


def _result(engine: Any, data: Updates) -> Result | None:
    """What is known of the run, the hub asked and waited for; None where an argument is faulty, or a step of ours."""
    try:
        arguments = common._clean_cmd(engine.runner._parse_train_args(data))
        looked = look(arguments)
        if looked.asking:
            MODELS.wait()
            looked = look(arguments)
        return looked.result
    except UserError:
        return None  # LLaMA-Factory will say so itself
    except Exception as error:
        handoff.warn_once(f"the run could not be judged ({type(error).__name__}: {error})")
        return None


def _judged(engine: Any, data: Updates) -> str:
    result = _result(engine, data)
    lang = data[engine.manager.get_elem_by_id("top.lang")]
    return f"**? {say('faulty', lang)}**" if result is None else _markdown(result, lang)


def _markdown(result: Result, lang: str) -> str:
    word = result.verdict.word
    return f"**{panel.MARKS[word]} {say(word, lang)}**: {panel.sentence(result, lang)}"
