"""Changes single arguments in a YAML file and leaves its order, its comments and all else as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamafactory_preflight.remedies import as_text


def changed(text: str, changes: Mapping[str, Any], *, reason: str) -> str:
    """The text with other values.

    Args:
        text: YAML as LLaMA-Factory takes it: one `key: value` a line.
        changes: Arguments by name.
        reason: Stands above the arguments that the text did not have.
    """
    lines = text.splitlines()
    added = []
    for name, value in changes.items():
        pattern = re.compile(rf"^{re.escape(name)}\s*:\s*(?P<old>.*?)\s*(?:\s#.*)?$")
        places = [place for place, line in enumerate(lines) if pattern.match(line)]
        match = pattern.match(lines[places[-1]]) if places else None
        if match is None:
            added.append(f"{name}: {as_text(value)}")
        elif match["old"] != as_text(value):
            lines[places[-1]] = f"{name}: {as_text(value)}  # was {match['old'] or 'empty'}"
    if added:
        lines += ["", f"### {reason}", *added]
    return "\n".join(lines) + "\n"
