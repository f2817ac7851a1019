"""Files of which a reader, or a disk that is full, never sees half."""

from __future__ import annotations

import os
from pathlib import Path


def write(file: Path, text: str) -> None:
    """Writes a file whole or not at all, and its folders.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
