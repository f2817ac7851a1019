"""Changes single arguments in a YAML file and leaves its order, its comments and all else as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamafactory_preflight import presets
from llamafactory_preflight.advice.remedies import as_text


LONGEST_OLD_VALUE = 40
_FIGURES = re.compile(r"# (Measured: |.* predicted to need )", re.MULTILINE)
_HOLDS_NO_MORE = re.compile(r"# (?!Needs )")


def changed(text: str, changes: Mapping[str, Any], *, reason: str) -> str:
    """The text with other values.

    Args:
        text: YAML as LLaMA-Factory takes it: a mapping.
        changes: Arguments by name.
        reason: Stands above the arguments that the text did not have.

    Returns:
        The text, in which only the values differ. Where YAML's more unusual forms do not allow that (aliases, braces,
        several documents), all arguments are written anew, and the comments are lost.
    """
    import yaml

    edited = _edited(text, changes, reason)
    wanted = (yaml.safe_load(text) or {}) | {name: yaml.safe_load(as_text(value)) for name, value in changes.items()}
    try:
        is_right = yaml.safe_load(edited) == wanted
    except yaml.YAMLError:
        is_right = False
    return edited if is_right else yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)


def write(output: Path, source: Path, changes: Mapping[str, Any], *, command: str) -> None:
    """Writes a file with other values to another place, whole or not at all, and says so on standard error.

    Raises:
        UserError: It cannot be written.
    """
    before = source.read_text(encoding="utf-8")
    text = changed(before, changes, reason=f"added by {command}")
    if text != before:
        text = renamed(text, source=source.name, output=str(output), command=f"llamafactory-cli {command}")
    presets.put({output: text.encode()}, output, force=True)
    print(f"Written: {output}", file=sys.stderr)


def renamed(text: str, *, source: str, output: str, command: str) -> str:
    """A changed preset without the figures that stand above it and are those of the file that it was made from.

    Args:
        text: YAML.
        source: The name of the file that it was made from.
        output: The file that it becomes.
        command: What made it.

    Returns:
        The text as it is where no figures of ours stand above it: whoever wrote the comments knows what they say.
    """
    head, blank, rest = text.partition("\n\n")
    lines = head.splitlines()
    if not blank or not _FIGURES.search(head) or not all(line.startswith("#") for line in lines):
        return text
    made = [
        f"# {source}, changed by {command}. What was measured or predicted of it does not hold here.",
        f"# Run: llamafactory-cli train {output}",
    ]
    return "\n".join([*made, *(line for line in lines if not _HOLDS_NO_MORE.match(line))]) + blank + rest


def _edited(text: str, changes: Mapping[str, Any], reason: str) -> str:
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    places = {key.value: value for key, value in pairs}
    added = [f"{name}: {as_text(value)}" for name, value in changes.items() if name not in places]
    for name in reversed([name for name in places if name in changes]):  # so that the places before stay right
        begin, end = places[name].start_mark.index, places[name].end_mark.index
        old, new = " ".join(text[begin:end].split()), as_text(changes[name])
        if old == new:
            continue
        line_end = text.find("\n", end) if "\n" in text[end:] else len(text)
        shown = old if len(old) <= LONGEST_OLD_VALUE else "longer"
        blank = "" if text[:begin].endswith((" ", "\t")) else " "
        text = f"{text[:begin]}{blank}{new}  # was {shown or 'empty'}{text[line_end:]}"
    if added:
        text = "\n".join([text.rstrip("\n"), "", f"### {reason}", *added])
    return text.rstrip("\n") + "\n"
