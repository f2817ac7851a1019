"""Prepares a dataset around LLaMA-Factory's tokenization, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from llamafactory_preflight.fixer import choose, prepare, session
from llamafactory_preflight.fixer.processors import KEPT, SEEN
from llamafactory_preflight.fixer.tally import Tally, tell_cost, tell_if_many, tell_lost, tell_too_long
from llamafactory_preflight.fixer.template import OfficialTemplate
from llamafactory_preflight.templates import families
from llamafactory_preflight.templates.record import Record, majority
from llamafactory_preflight.templates.thinking import asked_for


NUM_STREAMED = 1000  # of streamed data, what is looked at before the training
STREAMED_AT_ONCE = 16  # `datasets` joins the keys of a batch into one, and then again those of LLaMA-Factory's batches


def preprocess(original: Callable[..., Any], dataset: Any, kwargs: dict[str, Any]) -> Any:
    """Prepares, tokenizes by LLaMA-Factory, and leaves out what has nothing to learn.

    Args:
        original: LLaMA-Factory's `_get_preprocessed_dataset`; called exactly once.
        dataset: The aligned dataset.
        kwargs: Its other arguments by name.
    """
    data_args, training_args, stage, template = (
        kwargs[name] for name in ("data_args", "training_args", "stage", "template")
    )
    if stage == "pt":
        return original(dataset, **kwargs)
    do_generate = bool(training_args.predict_with_generate and kwargs["is_eval"])
    staged = choose.for_stage(template, stage, do_generate=do_generate, cutoff_len=data_args.cutoff_len)
    mapper = prepare.Preparation(
        template=staged,
        splits=stage == "sft" and not do_generate,
        num_answers=2 if stage in ("rm", "kto") else 1,
        is_feedback=stage == "kto",
    )
    options: dict[str, Any] = {"batched": True, "with_indices": True, "batch_size": STREAMED_AT_ONCE}
    if not data_args.streaming:
        options |= {
            "batch_size": data_args.preprocessing_batch_size,
            "num_proc": data_args.preprocessing_num_workers,
            "load_from_cache_file": (not data_args.overwrite_cache) or training_args.local_process_index != 0,
            "desc": "Looking at samples",
        }
    prepared = dataset.map(mapper, **options)
    is_streamed, which = data_args.streaming, "evaluation" if kwargs["is_eval"] else "training"
    tally = Tally.of(_noted(prepared, is_streamed=is_streamed))
    tell_lost(tally, which=which, is_part=is_streamed, places=_places(dataset))
    if staged.purpose == "train" and not kwargs["is_eval"]:
        _settle_mode(tally, template, kwargs["tokenizer"], kwargs.get("processor"))
    if is_streamed and tally.rows:
        kept = dataset.map(replace(mapper, notes=False), **options)
    else:
        kept = _without_lost(prepared, tally)
    result = original(kept, **kwargs)
    if staged.purpose != "train":
        tell_if_many(tally, 1, 1, which=which)
        return result
    if stage == "sft" and data_args.packing:
        num_seen, num_kept, result = _packed(result, tally, is_streamed=is_streamed)
    else:
        num_seen, num_kept, result = _full(result, tally, is_streamed=is_streamed)
    tell_too_long(num_seen, num_kept, is_part=is_streamed)
    tell_if_many(tally, num_seen, num_kept, which=which)
    return result


def _places(dataset: Any) -> list[int] | None:
    """Where the rows stood before they were shuffled; None where they were not, and for a stream."""
    indices = getattr(dataset, "_indices", None)
    return None if indices is None else indices.column(0).to_pylist()


def _noted(prepared: Any, *, is_streamed: bool) -> Iterator[dict[str, Any]]:
    if is_streamed:
        return iter(list(islice(iter(prepared), NUM_STREAMED)))
    return iter(prepared.select_columns(list(prepare.OURS)))


def _without_lost(prepared: Any, tally: Tally) -> Any:
    """The samples that LLaMA-Factory gets; if none is left, all of them, about which it then complains."""
    kept = prepared
    if tally.rows and tally.num_lost:
        kept = prepared.select([at for at, reason in enumerate(prepared[prepare.LOST]) if not reason])
    return kept.remove_columns(list(prepare.OURS))


def _settle_mode(tally: Tally, template: OfficialTemplate, tokenizer: Any, processor: Any) -> None:
    """The mode of most answers becomes the default of the chat template that is saved."""
    family = template.style.family
    mode = majority(tally.num_think, tally.num_no_think, otherwise=template.default_mode)
    if mode not in family.modes:
        mode = family.modes[0]
    template.default_mode = mode
    for owner in (tokenizer, processor):
        if families.recognise(getattr(owner, "chat_template", None)) == family:
            owner.chat_template = families.with_default(owner.chat_template, mode)
    session.CURRENT.record = Record(
        mode=mode,
        num_think=tally.num_think,
        num_no_think=tally.num_no_think,
        family=family.name,
        template=family.template,
        rules=template.rules,
    )
    if len(family.modes) > 1 and tally.rows:
        words = "with thinking" if mode == "think" else "without thinking"
        session.say(
            f"{tally.num_think} answers are trained with thinking and {tally.num_no_think} without. "
            f"The saved chat template answers {words} unless it is told otherwise"
        )
    if asked_for(template.enable_thinking) is True and tally.num_no_think and len(family.modes) > 1:
        session.say(
            f"enable_thinking: true is set, and {tally.num_no_think} answers have no reasoning: they are trained "
            "after the prompt without. LLAMAFACTORY_TEMPLATE_EMPTY_THINK=train trains an empty block as before"
        )


def _packed(result: Any, tally: Tally, *, is_streamed: bool) -> tuple[int, int, Any]:
    """Samples that were tokenized, those that went into a pack, and the packs alone."""
    if is_streamed:
        num_seen = num_kept = 0
        for row in result:
            num_seen, num_kept = num_seen + row[SEEN], num_kept + row[KEPT]
            if num_seen >= NUM_STREAMED:
                break
    else:
        tell_cost(tally, [])
        num_seen, num_kept = tally.num_rows, sum(result[KEPT]) if KEPT in result.column_names else 0
    columns = [name for name in (SEEN, KEPT) if is_streamed or name in result.column_names]
    return num_seen, num_kept, result.remove_columns(columns)


def _full(result: Any, tally: Tally, *, is_streamed: bool) -> tuple[int, int, Any]:
    """Samples that were tokenized, those that have something to learn, and only these."""
    if is_streamed:
        first = [_is_full(row) for row in islice(iter(result), NUM_STREAMED)]
        return len(first), sum(first), result.filter(_is_full)
    column = next((name for name in ("input_ids", "chosen_input_ids") if name in result.column_names), None)
    if column is None:  # not one sample is left
        return 0, 0, result
    chunks = result.data.column(column).chunks
    lengths = [length for chunk in chunks for length in chunk.value_lengths().to_pylist()]
    tell_cost(tally, lengths)
    full = [position for position, length in enumerate(lengths) if length]
    return len(lengths), len(full), result if len(full) == len(lengths) else result.select(full)


def _is_full(row: dict[str, Any]) -> bool:
    return bool(row.get("input_ids") or row.get("chosen_input_ids"))
