"""How long the samples of a data set are: a fourth of their letters, as no tokenizer is loaded."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamafactory_preflight.run import RunDescription


LETTERS_PER_TOKEN = 4
TOKENS_OF_A_TURN = 5  # <|im_start|>, role, line break, <|im_end|>, line break
MOST_ROWS = 5000
MOST_BYTES = 64 * 2**20


def estimated(run: RunDescription) -> list[int]:
    """Lengths in tokens, or none where the data is not in files beside `dataset_info.json`."""
    lengths: list[int] = []
    folder = Path(run.dataset_dir)
    with suppress(OSError, ValueError, AttributeError):
        described = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        for name in run.dataset:
            file = described.get(name, {}).get("file_name")
            if not file or (folder / file).stat().st_size > MOST_BYTES:
                return []
            rows = _rows(folder / file)[:MOST_ROWS]
            lengths += [_tokens(row) for row in rows]
    return lengths


def _rows(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = json.loads(text) if file.suffix == ".json" else []
    return rows if isinstance(rows, list) else []


def _tokens(row: Any) -> int:
    texts = list(_texts(row))
    return sum(-(-len(text.encode()) // LETTERS_PER_TOKEN) + TOKENS_OF_A_TURN for text in texts if text)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in _texts(child)]
