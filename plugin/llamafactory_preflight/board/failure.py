"""Makes a short message of all that a failed training wrote. Pure."""

from __future__ import annotations

import re

from llamafactory_preflight.board.words import say


LONGEST_REASON = 1500
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Of torchrun, which only says that one of its children failed, and of the launcher, which says it again.
_ECHO = re.compile(r"ChildFailedError|CalledProcessError")
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\b(?:: .*)?$"
)


def short(heading: str, output: str, lang: str | None, *, file: str) -> str:
    """Markdown: the heading, the reason, and where all of the output is.

    Args:
        heading: What LLaMA-Board says, with the exit code.
        output: What the training wrote.
        lang: The board's language.
        file: Where the output was written to, or empty.
    """
    told = reason(_COLOUR.sub("", output).strip())[-LONGEST_REASON:].replace("```", "")
    parts = [
        heading,
        f"```text\n{told}\n```" if told else "",
        f"{say('whole_output', lang)}: `{file}`" if file else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def reason(output: str) -> str:
    """The refusal of the preflight, or the last exception with what it says, or the last line."""
    lines = output.splitlines()
    if any(line.startswith("Stopped before loading") for line in lines):
        return _refusal(lines)
    found = ""
    for number, line in enumerate(lines):
        match = _EXCEPTION.match(line)
        if match and not _ECHO.search(match.group(1)):
            found = "\n".join([line, *_continued(lines[number + 1 :])])
    return found or next((line for line in reversed(lines) if line.strip()), "")


def _refusal(lines: list[str]) -> str:
    end = max(number for number, line in enumerate(lines) if line.startswith("Stopped before loading"))
    verdict = re.compile(r"WILL NOT FIT\b")
    start = next((number for number in range(end, -1, -1) if verdict.search(lines[number])), end)
    return "\n".join(lines[start : end + 1])


def _continued(lines: list[str]) -> list[str]:
    """Further lines of an exception's message."""
    kept: list[str] = []
    for line in lines[:12]:
        if line.startswith(("Traceback", "During handling", "The above exception", "E0", "W0", "[rank")):
            break
        kept.append(line)
    return "\n".join(kept).rstrip().splitlines()
