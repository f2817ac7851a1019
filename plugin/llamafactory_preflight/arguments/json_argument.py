"""Arguments that hold a configuration or name its file: DeepSpeed's and FSDP's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamafactory_preflight.errors import UserError, words
from llamafactory_preflight.phrases import phrase


def read(value: Any, argument: str, kind: str) -> dict[str, Any] | None:
    """A configuration that an argument holds, or the file that it names.

    Raises:
        UserError: There is no such file, or no JSON object in it.
    """
    if value is None or isinstance(value, dict):
        return value or None
    try:
        text = str(value) if str(value).startswith("{") else Path(str(value)).read_text(encoding="utf-8")
        loaded = json.loads(text)
    except FileNotFoundError:
        what = phrase("The {kind} file {value} does not exist", kind=kind, value=value)
    except (OSError, ValueError, RecursionError) as error:
        why = words(error)
        what = phrase("The {kind} file {value} is not readable JSON: {why}", kind=kind, value=value, why=why)
    else:
        if isinstance(loaded, dict):
            return loaded
        what = phrase("The {kind} file {value} holds no JSON object", kind=kind, value=value)
    raise UserError(what, where=f"`{argument}`")
