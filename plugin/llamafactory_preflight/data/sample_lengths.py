"""How long the samples of a data set are: a fourth of their letters, as no tokenizer is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamafactory_preflight.arguments import paths
from llamafactory_preflight.data import rows
from llamafactory_preflight.run import RunDescription


LETTERS_PER_TOKEN = 4
TOKENS_OF_A_TURN = 5  # <|im_start|>, role, line break, <|im_end|>, line break
MOST_ROWS = 5000


def estimated(run: RunDescription) -> list[int]:
    """Lengths in tokens, or none where the data is not in files beside `dataset_info.json`."""
    folder = Path(run.dataset_dir)
    known = paths.datasets_in(folder)
    try:
        found = [rows.read(folder / known[name]["file_name"])[:MOST_ROWS] for name in run.dataset]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [_tokens(row) for each in found for row in each]


def _tokens(row: Any) -> int:
    texts = list(_texts(row))
    return sum(-(-len(text.encode()) // LETTERS_PER_TOKEN) + TOKENS_OF_A_TURN for text in texts if text)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in _texts(child)]
