"""Prepares a dataset around LLaMA-Factory's tokenization, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from llamafactory_preflight.fixer import choose, prepare, session
from llamafactory_preflight.fixer.template import OfficialTemplate
from llamafactory_preflight.templates import families
from llamafactory_preflight.templates.record import Record, majority
from llamafactory_preflight.templates.thinking import asked_for


NUM_STREAMED = 1000  # of streamed data, what is looked at before the training
NUM_NAMED = 5
MANY_LOST = 0.05


@dataclass(kw_only=True, slots=True)
class Tally:
    """What the preparation found.

    Attributes:
        num_samples: Conversations.
        num_think: Trained answers with reasoning.
        num_no_think: Trained answers without.
        lost: Indices of samples that are left out, by reason.
        odd: Indices of samples that are kept although something is strange.
        rows: Of each sample that is kept, the conversation that it comes from.
    """

    num_samples: int = 0
    num_think: int = 0
    num_no_think: int = 0
    lost: dict[str, list[int]] = field(default_factory=dict)
    odd: dict[str, list[int]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> Tally:
        """Counts rows that carry what the preparation wrote into them."""
        tally = cls()
        before = None
        for row in rows:
            index = row[prepare.INDEX]
            tally.num_samples += index != before
            if not row[prepare.LOST]:
                tally.rows.append(index)
            tally.num_think += row[prepare.THINK]
            tally.num_no_think += row[prepare.NO_THINK]
            for reason, found in ((row[prepare.LOST], tally.lost), (row[prepare.ODD], tally.odd)):
                if reason and index != before:
                    found.setdefault(reason, []).append(index)
            before = index
        return tally

    @property
    def num_rows(self) -> int:
        """Samples that the conversations became."""
        return len(self.rows)

    @property
    def num_lost(self) -> int:
        """Samples that are left out."""
        return sum(map(len, self.lost.values()))


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
    mapper = prepare.Preparation(template=staged, splits=stage == "sft" and not do_generate)
    options: dict[str, Any] = {}
    if not data_args.streaming:
        options = {
            "num_proc": data_args.preprocessing_num_workers,
            "load_from_cache_file": (not data_args.overwrite_cache) or training_args.local_process_index != 0,
            "desc": "Looking at samples",
        }
    prepared = dataset.map(
        mapper, batched=True, with_indices=True, batch_size=data_args.preprocessing_batch_size, **options
    )
    tally = Tally.of(_noted(prepared, is_streamed=data_args.streaming))
    _report(tally, staged, is_eval=kwargs["is_eval"], is_streamed=data_args.streaming)
    if staged.purpose == "train" and not kwargs["is_eval"]:
        _settle_mode(tally, template, kwargs["tokenizer"], kwargs.get("processor"))
    result = original(prepared.remove_columns(list(prepare.OURS)), **kwargs)
    if staged.purpose != "train":
        return result
    return _without_empty(result, tally, is_streamed=data_args.streaming)


def _noted(prepared: Any, *, is_streamed: bool) -> Iterator[dict[str, Any]]:
    if is_streamed:
        return iter(list(islice(iter(prepared), NUM_STREAMED)))
    return iter(prepared.select_columns(list(prepare.OURS)))


def _report(tally: Tally, template: OfficialTemplate, *, is_eval: bool, is_streamed: bool) -> None:
    which = "evaluation" if is_eval else "training"
    seen = f"the first {tally.num_rows} samples" if is_streamed else f"{tally.num_samples} samples"
    for found, fate in ((tally.lost, "left out"), (tally.odd, "kept")):
        for reason, indices in found.items():
            named = ", ".join(map(str, indices[:NUM_NAMED])) + (", ..." if len(indices) > NUM_NAMED else "")
            session.say(f"{len(indices)} of {seen} for {which} {fate}: {reason} (index {named})")
    if tally.num_lost > MANY_LOST * tally.num_samples:
        session.say(
            f"{tally.num_lost / tally.num_samples:.0%} of the data for {which} is lost. Look at the lines above"
        )


def _tell_cost(tally: Tally, lengths: Sequence[int]) -> None:
    """What taking conversations apart costs, once it is known how long the samples are."""
    grown = tally.num_rows / max(1, tally.num_samples - tally.num_lost)
    if grown <= 1:
        return
    tokens = ""
    if len(lengths) == len(tally.rows):  # not packed
        last = dict(zip(tally.rows, lengths, strict=True))  # the last sample of a conversation holds the others
        tokens = f" and {sum(lengths)} tokens instead of about {sum(last.values())}"
    session.say(
        f"{tally.num_samples} conversations became {tally.num_rows} samples{tokens}, because an earlier answer is "
        f"served otherwise than the last one. An epoch has {grown:.2f} times the steps, and mixing ratios count "
        "answers. LLAMAFACTORY_TEMPLATE_TURNS=last trains the last answers only, =concat all of them in one text"
    )


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
    if len(family.modes) > 1:
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


def _without_empty(result: Any, tally: Tally, *, is_streamed: bool) -> Any:
    column = next((name for name in ("input_ids", "chosen_input_ids") if name in (result.column_names or ())), None)
    if is_streamed or column is None:
        return result.filter(_is_full)
    chunks = result.data.column(column).chunks
    lengths = [length for chunk in chunks for length in chunk.value_lengths().to_pylist()]
    _tell_cost(tally, lengths)
    full = [position for position, length in enumerate(lengths) if length]
    num_empty = len(lengths) - len(full)
    if not num_empty:
        return result
    session.say(f"{num_empty} samples are left out: their answer alone is longer than cutoff_len")
    if num_empty > MANY_LOST * len(lengths):
        session.say(f"{num_empty / len(lengths):.0%} of the data is lost. Raise cutoff_len")
    return result.select(full)


def _is_full(row: dict[str, Any]) -> bool:
    return bool(row.get("input_ids") or row.get("chosen_input_ids"))
