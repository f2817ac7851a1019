"""Tells whether the chosen template is the one of the chosen model, and shows a sample with its loss mask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import yaml
from llamafactory.data.template import TEMPLATES
from llamafactory.extras.constants import DEFAULT_TEMPLATE

from llamafactory_preflight.arguments import paths
from llamafactory_preflight.board import failure, panel
from llamafactory_preflight.board.words import say
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.model import hub
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.templates import families


LONGEST_SAMPLE_SECONDS = 180
NUM_SAMPLES = 16  # tokenized for the one that is shown: the first ones may be faulty
CLASSES = {(False, False): "prompt", (False, True): "prompt special", (True, False): "", (True, True): "special"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Which template a model has.

    Attributes:
        model: What to call the model.
        template: LLaMA-Factory's name of its template, or None where that is not known.
    """

    model: str
    template: str | None


def match(model_name: str | None, model_path: str | None) -> Match:
    """The template of a model: by its tokenizer where that is on this machine, else by LLaMA-Factory's own table."""
    chat_template = _chat_template(model_path or "")
    family = families.recognise(chat_template)
    if family is not None and family.template in TEMPLATES:
        return Match(model=family.name, template=family.template)
    return Match(model=str(model_name), template=DEFAULT_TEMPLATE.get(model_name or ""))


def words(found: Match, given: str, lang: str | None) -> str:
    """What to say beside the template menu."""
    if found.template is None:
        return panel.page(f"<p>? {escape(say('template_unknown', lang))}</p>")
    if found.template == given:
        return panel.page(f"<p>✓ {escape(say('template_right', lang, model=found.model))}</p>")
    text = say("template_wrong", lang, model=found.model, template=found.template, given=given)
    return panel.page(f'<p class="verdict tight">{escape(text)}</p>')


def sample(arguments: Mapping[str, Any], lang: str | None) -> str:
    """The first sample of the chosen dataset as the model will see it.

    It is rendered by `llamafactory-cli template` in a process of its own: the board's process keeps its state, and no
    GPU is touched.

    Raises:
        UserError: There is none to show.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        few = paths.resolve(arguments, beside=None)[0] | {
            "max_samples": NUM_SAMPLES,
            "preprocessing_num_workers": None,
        }
        file.write_text(yaml.safe_dump(few), encoding="utf-8")
        command = [sys.executable, "-m", "llamafactory_preflight", "template", str(file), "--sample", "1", "--json"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LONGEST_SAMPLE_SECONDS,
                env=_without_gpu(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            what = phrase("The dataset was not read within {seconds} seconds", seconds=LONGEST_SAMPLE_SECONDS)
            raise UserError(what) from None
    if done.returncode:
        raise UserError(failure.reason(done.stderr).removesuffix(".") or "The dataset cannot be shown")
    shown = json.loads(done.stdout.splitlines()[-1])
    if not shown["samples"]:
        raise UserError("No sample of the dataset is left")
    return _as_html(shown["samples"][0], shown["findings"], lang)


def _as_html(shown: Mapping[str, Any], findings: list[str], lang: str | None) -> str:
    pieces = []
    for piece in shown["pieces"]:
        tag = "mark" if piece["has_loss"] else "span"
        kind = CLASSES[piece["has_loss"], piece["is_special"]]
        pieces.append(f'<{tag} class="{kind}">{escape(piece["text"])}</{tag}>')
    counts = say("sample_counts", lang, tokens=shown["num_tokens"], trained=shown["num_trained"])
    lines = "".join(f"<p>{escape(finding)}</p>" for finding in findings)
    notes = (
        f'<details lang="en"><summary>llamafactory-preflight ({len(findings)})</summary>{lines}</details>'
        if findings
        else ""
    )
    return panel.page(f'<p>{escape(counts)}</p><pre tabindex="0">{"".join(pieces)}</pre>{notes}')


def _without_gpu() -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "FORCE_TORCHRUN": "0"}


def _chat_template(model_path: str) -> str | None:
    folder = Path(model_path) if os.path.isdir(model_path) else hub.snapshot(model_path)
    if folder is None:
        return None
    stamps = []
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            stamps.append((folder / name).stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return _read(folder, tuple(stamps))


@lru_cache(maxsize=16)
def _read(folder: Path, stamps: tuple[int, ...]) -> str | None:
    """The template that lies beside a tokenizer; the stamps make a changed file another one."""
    try:
        if stamps[0]:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        loaded = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return loaded if isinstance(loaded, str) else None
