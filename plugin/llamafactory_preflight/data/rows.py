"""The rows of a data file on this machine, where it is JSON of a moderate size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any


LARGEST = 64 * 2**20
"""Bytes of a file that is read at once, which takes about a second."""
MOST_WORDS = 16


def read(file: Path) -> list[Any]:
    """All rows: of a list in a `.json` file, or of lines that are JSON each, as LLaMA-Factory's reader takes both.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON, of another kind, or larger than `LARGEST`.
    """
    if file.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{file} is not JSON")
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file} is too large")
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        loaded = json.loads(text, strict=False)
        return loaded if isinstance(loaded, list) else []
    return [json.loads(line, strict=False) for line in text.splitlines() if line.strip()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What all rows of a file have together; a column that one row has is there for every row, if only empty.

    Attributes:
        num_rows: How many there are.
        columns: Names of the columns.
        items: Of columns that hold lists of mappings, such as `messages`: the names in these mappings, and the words
            that stand there; of names with more than `MOST_WORDS` different ones, only so many.
    """

    num_rows: int
    columns: frozenset[str]
    items: Mapping[str, Mapping[str, frozenset[str]]]


def table(file: Path) -> Table | None:
    """The table of a file, or None where it cannot be told; read again only when the file has changed."""
    try:
        stat = file.stat()
        return _table(file, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=16)
def _table(file: Path, _changed: int, _size: int) -> Table:
    rows = read(file)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} holds rows that are no mappings")
    items: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for column, value in row.items():
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                _add(items.setdefault(column, {}), value)
    return Table(
        num_rows=len(rows),
        columns=frozenset().union(*rows),
        items={column: {name: frozenset(words) for name, words in names.items()} for column, names in items.items()},
    )


def _add(names: dict[str, set[str]], mappings: list[dict[str, Any]]) -> None:
    for mapping in mappings:
        for name, value in mapping.items():
            words = names.setdefault(name, set())
            if isinstance(value, str) and len(words) < MOST_WORDS:
                words.add(value)
