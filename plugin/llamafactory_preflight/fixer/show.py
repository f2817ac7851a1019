"""Tokenizes a run's dataset as LLaMA-Factory would, without weights, for `llamafactory-cli template`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.data import loader as data_loader
from llamafactory.hparams import parser
from llamafactory.model import load_tokenizer

from llamafactory_preflight.errors import UserError, words
from llamafactory_preflight.fixer import session
from llamafactory_preflight.templates.view import Piece, Sample


NUM_LOOKED_AT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What a run's data becomes.

    Attributes:
        samples: The first ones, to look at.
        lengths: Tokens of each sample that was looked at.
        trained: Tokens with loss of each.
        cutoff_len: The run's limit.
        findings: What the fixer said on the way.
    """

    samples: tuple[Sample, ...]
    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    cutoff_len: int
    findings: tuple[str, ...]


def show(arguments: dict[str, Any], *, num_samples: int) -> Shown:
    """Runs LLaMA-Factory's own steps up to the tokenized dataset.

    Raises:
        UserError: The run has no dataset to show, or LLaMA-Factory refuses it.
    """
    try:
        return _show(arguments, num_samples)
    except UserError:
        raise
    except (ValueError, OSError, ImportError) as error:
        cause = f": {words(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
        raise UserError(f"LLaMA-Factory refuses this run: {words(error).rstrip('.')}{cause.rstrip('.')}") from None


def _show(arguments: dict[str, Any], num_samples: int) -> Shown:
    # Samples are the same on any machine, so nothing is asked that needs a card.
    given = {"output_dir": "saves", "report_to": "none", **arguments, "use_cpu": True}
    model_args, data_args, training_args, finetuning_args, _ = parser._parse_train_args(given)
    if data_args.dataset is None:
        raise UserError("The run has no dataset", next_step="Set `dataset`")
    data_args.max_samples = min(data_args.max_samples or NUM_LOOKED_AT, NUM_LOOKED_AT)
    data_args.streaming = False
    # A packed sequence is thousands of tokens of many samples; those are what there is to look at.
    data_args.packing = bool(data_args.packing) and finetuning_args.stage != "sft"
    data_args.neat_packing = data_args.neat_packing and data_args.packing
    stage = "rm" if finetuning_args.stage == "dpo" else finetuning_args.stage
    loaded = load_tokenizer(model_args)
    tokenizer = loaded["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    merged = data_loader._get_merged_dataset(data_args.dataset, model_args, data_args, training_args, stage)
    training_args.log_level = "error"
    rows = data_loader._get_preprocessed_dataset(merged, data_args, _quiet(training_args), stage, template, **loaded)
    pairs = [pair for row in rows for pair in _pairs(row)]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return Shown(
        samples=tuple(_sample(tokenizer, special, *pair) for pair in islice(pairs, num_samples)),
        lengths=tuple(len(ids) for ids, _ in pairs),
        trained=tuple(sum(label >= 0 for label in labels) for _, labels in pairs),
        cutoff_len=data_args.cutoff_len,
        findings=(*session.SAID, *(f"repaired: {difference}" for difference in session.CURRENT.differences)),
    )


def _quiet(training_args: Any) -> Any:
    """LLaMA-Factory prints an example of its own where it may log."""

    class Quiet(type(training_args)):  # type: ignore[misc]
        should_log = False

    training_args.__class__ = Quiet
    return training_args


def _pairs(row: dict[str, Any]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for prefix in ("", "chosen_", "rejected_"):
        if f"{prefix}input_ids" in row:
            ids = row[f"{prefix}input_ids"]
            labels = row.get(f"{prefix}labels", [-100] * len(ids))
            if len(labels) == len(ids):
                yield ids, labels
            else:  # a prediction: its label is a text of its own
                yield [*ids, *labels], [-100] * len(ids) + list(labels)


def _sample(tokenizer: Any, special: set[int], ids: Sequence[int], labels: Sequence[int]) -> Sample:
    kinds = groupby(zip(ids, labels, strict=True), key=lambda pair: (pair[1] >= 0, pair[0] in special))
    pieces = tuple(
        Piece(text=tokenizer.decode([token for token, _ in run]), has_loss=has_loss, is_special=is_special)
        for (has_loss, is_special), run in kinds
    )
    return Sample(pieces=pieces, num_tokens=len(ids), num_trained=sum(label >= 0 for label in labels))
