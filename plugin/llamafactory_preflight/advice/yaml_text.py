"""Changes single arguments in a YAML file and leaves its order, its comments and all else as they are."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments, presets
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
        The text, in which only the values differ; a comment behind one stays. Where YAML's more unusual forms do not
        allow that (aliases, braces, an end of the document), all arguments are written anew, below the comments.
    """
    import yaml

    edited = _edited(text, changes, reason)
    wanted = (yaml.safe_load(text) or {}) | {name: yaml.safe_load(as_text(value)) for name, value in changes.items()}
    try:
        is_right = yaml.safe_load(edited) == wanted
    except yaml.YAMLError:
        is_right = False
    new = edited if is_right else yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)
    there = _comments(new)
    lost = [comment for comment in _comments(text) if not any(comment in each for each in there)]
    return "".join(f"# {comment}\n" for comment in lost) + new


def write(output: Path, source: Path, changes: Mapping[str, Any], *, overrides: Sequence[str], command: str) -> None:
    """Writes a file with other values to another place, whole or not at all, and says so on standard error.

    Args:
        output: Where to.
        source: A YAML file.
        changes: Arguments by name.
        overrides: `key=value` items that the file was read with; what they set is written too.
        command: What made the changes.

    Raises:
        UserError: It cannot be written.
    """
    before = source.read_text(encoding="utf-8")
    given = arguments.read(source, overrides)
    from_overrides = {name: given[name] for name in sorted(arguments.overridden(overrides)) if name in given}
    text = changed(before, from_overrides | dict(changes), reason=f"added by {command}")
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
        f"# Run: llamafactory-cli train {shlex.quote(output)}",
    ]
    return "\n".join([*made, *(line for line in lines if not _HOLDS_NO_MORE.match(line))]) + blank + rest


def _comments(text: str) -> list[str]:
    """What stands behind each `#`: YAML's tokens leave comments out, so they lie between two of them."""
    import yaml

    tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
    gaps = (text[one.end_mark.index : other.start_mark.index] for one, other in itertools.pairwise(tokens))
    found = (line.partition("#")[2].strip() for gap in gaps for line in gap.splitlines())
    return [comment for comment in found if comment]


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
        comment = text[end:line_end].strip(" \t#")
        blank = "" if text[:begin].endswith((" ", "\t")) else " "
        note = f"was {shown or 'empty'}{f'; {comment}' if comment else ''}"
        text = f"{text[:begin]}{blank}{new}  # {note}{text[line_end:]}"
    if added:
        text = "\n".join([text.rstrip("\n"), "", f"### {reason}", *added])
    return text.rstrip("\n") + "\n"
