"""How long the longest sample of a tokenized data set is, and how much of one is images: both decide a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamafactory_preflight.data.images import Counted


COLUMNS = ("input_ids", "chosen_input_ids", "rejected_input_ids", "kl_input_ids")
READ_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest sample.

    Attributes:
        tokens: Its length; of a pair, that of the longer half.
        index: Its number in the data set as it is trained on, from 0.
        num_samples: Samples in all.
        eval_tokens: The same as `tokens` of the evaluation sets; None where there are none, or it cannot be told.
    """

    tokens: int
    index: int
    num_samples: int
    eval_tokens: int | None = None


def longest(dataset_module: Mapping[str, Any]) -> Longest | None:
    """Looks through the data sets that LLaMA-Factory's get_dataset returned.

    Returns:
        The longest sample, or None where that cannot be told beforehand: streamed data, or no training set.
    """
    found = _longest_of(dataset_module.get("train_dataset"))
    if found is None:
        return None
    evaluated = dataset_module.get("eval_dataset")  # several, by name, with eval_on_each_dataset
    sets = evaluated.values() if isinstance(evaluated, Mapping) else (evaluated,)
    tokens = [each.tokens if each is not None else None for each in map(_longest_of, sets)]
    known = [number for number in tokens if number is not None]
    return replace(found, eval_tokens=max(known) if known and len(known) == len(tokens) else None)


def _longest_of(dataset: Any) -> Longest | None:
    names = [name for name in COLUMNS if name in (getattr(dataset, "column_names", None) or ())]
    if not names or not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__"):
        return None
    import pyarrow.compute  # type: ignore[import-untyped]

    found, seen = None, 0
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=READ_AT_ONCE):
        for name in names:
            sizes = pyarrow.compute.list_value_length(table[name])
            largest = pyarrow.compute.max(sizes).as_py() or 0
            if found is None or largest > found.tokens:
                position = pyarrow.compute.index(sizes, largest).as_py()
                found = Longest(tokens=largest, index=seen + position, num_samples=len(dataset))
        seen += table.num_rows
    return found


def images(dataset_module: Mapping[str, Any], token_id: int) -> Counted | None:
    """Counts the images of a training set's samples, and the tokens that stand for them.

    Args:
        dataset_module: What LLaMA-Factory's get_dataset returned.
        token_id: The model's image token.

    Returns:
        The most that a sample has of both, or None where there are none or that cannot be told.
    """
    dataset: Any = dataset_module.get("train_dataset")
    names = {"images", "input_ids"}
    if names - set(getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "select_columns"):
        return None
    import pyarrow.compute as compute

    most_images = most_tokens = 0
    for table in dataset.select_columns(sorted(names)).with_format("arrow").iter(batch_size=READ_AT_ONCE):
        if not hasattr(table["images"].type, "value_type"):  # no sample of these has any
            continue
        most_images = max(most_images, compute.max(compute.list_value_length(table["images"])).as_py() or 0)
        samples = table["input_ids"].combine_chunks()
        found = compute.list_parent_indices(samples).filter(compute.equal(samples.flatten(), token_id))
        counts = compute.value_counts(found).field("counts")
        most_tokens = max(most_tokens, compute.max(counts).as_py() or 0)
    return Counted(images=most_images, tokens=most_tokens) if most_images and most_tokens else None
