"""Decides for a tokenizer and a run which template is used, and says what that changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llamafactory.data.template import TEMPLATES

from llamafactory_preflight.fixer import compare, session
from llamafactory_preflight.fixer.template import OfficialTemplate, make, style_for
from llamafactory_preflight.settings import Settings
from llamafactory_preflight.templates import families
from llamafactory_preflight.templates.audit import repairs
from llamafactory_preflight.templates.families import OWN_TEMPLATES, Family, Mode
from llamafactory_preflight.templates.thinking import asked_for


Original = Callable[[Any, Any], Any]


def template_for(original: Original, tokenizer: Any, data_args: Any, settings: Settings) -> Any:
    """LLaMA-Factory's template, or ours in its place.

    Args:
        original: LLaMA-Factory's `get_template_and_fix_tokenizer`; called once, with `data_args` or a copy of them.
        tokenizer: The tokenizer, which it may change.
        data_args: LLaMA-Factory's data arguments.
        settings: The plugin's switches.
    """
    chat_template, given = tokenizer.chat_template, data_args.template
    session.CURRENT.repairs = False
    if session.CURRENT.is_bypassed:
        return original(tokenizer, data_args)
    family = families.recognise(chat_template)
    if family is None:
        if given in OWN_TEMPLATES and isinstance(chat_template, str):
            session.say(
                "the chat template of this tokenizer is not an official one that is known, so it is left alone"
            )
        return original(tokenizer, data_args)
    if given is not None and given not in OWN_TEMPLATES:
        session.say(f"{family.name} is not trained with `template: {given}`. Use `template: {family.template}`")
        return original(tokenizer, data_args)
    name = family.template if family.template in TEMPLATES else given
    if name is None:
        return original(tokenizer, data_args)
    if settings.template == "warn":
        factory = original(tokenizer, data_args)
        ours = _official(factory, tokenizer, data_args, family, chat_template, settings)
        differences = [difference.message for difference in compare.audit(factory, ours, tokenizer)]
        if differences:
            session.say(f"`template: {given}` is not the chat template of {family.name}, and stays:", *differences)
        return factory
    arguments = copy.copy(data_args)
    arguments.template = name
    factory = original(tokenizer, arguments)
    ours = _official(factory, tokenizer, data_args, family, chat_template, settings)
    found = compare.audit(factory, ours, tokenizer)
    if not found and given == name:
        return factory
    if given != name:
        session.say(f"{family.name} is not trained with `template: {given}`; `{name}` is used")
    if found:
        session.CURRENT.differences = tuple(difference.message for difference in found)
        count = f"{len(found)} of {compare.NUM_CHECKS} checks, which `llamafactory-cli template` lists"
        session.say(f"repaired for {family.name}, where LLaMA-Factory's `{name}` failed {count}:", *repairs(found))
    tokenizer.chat_template = families.with_default(chat_template, ours.default_mode)
    processor = session.CURRENT.processor
    if families.recognise(getattr(processor, "chat_template", None)) == family:
        processor.chat_template = tokenizer.chat_template
    if session.CURRENT.export_dir:
        from llamafactory_preflight.fixer import files

        files.keep(tokenizer, processor)
    session.CURRENT.repairs = True
    return ours


def _official(
    factory: Any, tokenizer: Any, data_args: Any, family: Family, chat_template: str, settings: Settings
) -> OfficialTemplate:
    asked = asked_for(data_args.enable_thinking)
    preserve = bool(getattr(data_args, "preserve_thinking", False))
    style = style_for(
        tokenizer,
        family,
        families.without_default(chat_template),
        preserve=preserve and (family.has_preserve_thinking or family.keeps_history),
        loss_on_reasoning=settings.loss == "all",
    )
    ours = make(
        factory,
        style=style,
        default_mode=_default_mode(data_args, family, chat_template),
        empty_think=settings.empty_think if asked is True else "mask",
        turns="last" if data_args.mask_history else settings.turns,
        cutoff_len=None,
        purpose="predict",
    )
    # A True that nobody wrote is LLaMA-Factory's default, and says nothing about the run.
    ours.enable_thinking = asked if asked is not True or "enable_thinking" in session.CURRENT.explicit else None
    return ours


def _default_mode(data_args: Any, family: Family, chat_template: str) -> Mode:
    """What was trained; else what the template's name says; else what LLaMA-Factory's arguments say."""
    record = session.CURRENT.record
    if record is not None and record.mode in family.modes:
        return record.mode
    saved = families.default_mode(chat_template)
    if saved is not None and saved != family.modes[0]:  # a model that was exported in another mode
        return saved
    if str(data_args.template).endswith("_nothink") and "no_think" in family.modes:
        return "no_think"
    return family.modes[0]


def for_stage(template: OfficialTemplate, stage: str, *, do_generate: bool, cutoff_len: int) -> OfficialTemplate:
    """A copy for one kind of dataset; only what is trained may look at the answers."""
    trains = stage in ("rm", "kto") or (stage == "sft" and not do_generate)
    return replace(template, purpose="train" if trains else "predict", cutoff_len=cutoff_len)
