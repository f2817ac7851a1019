"""How long the longest sample of a tokenized data set is: it decides what the fullest batch takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


COLUMNS = ("input_ids", "chosen_input_ids", "rejected_input_ids", "kl_input_ids")
READ_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest sample.

    Attributes:
        tokens: Its length; of a pair, that of the longer half.
        index: Its number in the data set as it is trained on, from 0.
        num_samples: Samples in all.
    """

    tokens: int
    index: int
    num_samples: int


def longest(dataset_module: Mapping[str, Any]) -> Longest | None:
    """Looks through the training set that LLaMA-Factory's get_dataset returned.

    Returns:
        The longest sample, or None where that cannot be told beforehand: streamed data, or no training set.
    """
    dataset: Any = dataset_module.get("train_dataset")
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
