"""Shows tokenized samples: what is prompt, what has loss, and which tokens are special. Pure: it is given the text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


_RESET = "\033[0m"
_COLOURS = {
    (False, False): "\033[2m",
    (False, True): "\033[35m",
    (True, False): "\033[32m",
    (True, True): "\033[1;32m",
}
_CLASSES = {
    (False, False): "prompt",
    (False, True): "prompt special",
    (True, False): "loss",
    (True, True): "loss special",
}
_STYLE = """\
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; }
pre { white-space: pre-wrap; background: #f6f6f6; padding: 1em; }
.prompt { color: #777; }
.loss { background: #d5f0d5; color: #000; }
.special { font-weight: bold; color: #a0a; }"""
LEGEND = "grey or unmarked: prompt, no loss; green or [[...]]: trained; special tokens stand out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of tokens of one kind.

    Attributes:
        text: What they say.
        has_loss: Whether they are trained.
        is_special: Whether they are special tokens.
    """

    text: str
    has_loss: bool
    is_special: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tokenized sample.

    Attributes:
        pieces: Its text.
        num_tokens: Its length.
        num_trained: Tokens with loss.
    """

    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int


def terminal(sample: Sample, *, coloured: bool) -> str:
    """A sample for a terminal, or for a file where colours would be noise."""
    if coloured:
        return "".join(f"{_COLOURS[piece.has_loss, piece.is_special]}{piece.text}{_RESET}" for piece in sample.pieces)
    parts = []
    before = False
    for piece in sample.pieces:
        if piece.has_loss != before:
            parts.append("[[" if piece.has_loss else "]]")
        parts.append(piece.text)
        before = piece.has_loss
    return "".join(parts) + ("]]" if before else "")


def page(title: str, samples: Sequence[Sample], statistics: Sequence[str], findings: Sequence[str]) -> str:
    """A page of its own, without scripts and without anything to load."""
    shown = []
    for number, sample in enumerate(samples):
        text = "".join(
            f'<span class="{_CLASSES[piece.has_loss, piece.is_special]}">{html.escape(piece.text)}</span>'
            for piece in sample.pieces
        )
        shown.append(f"<h2>Sample {number}: {_counts(sample)}</h2>\n<pre>{text}</pre>")
    lists = [
        f"<h2>{name}</h2>\n<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"
        for name, lines in (("Numbers", statistics), ("Findings", findings))
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join(
        [
            "<!doctype html>",
            f"<html><head>{head}</head><body><h1>{html.escape(title)}</h1>",
            *lists,
            *shown,
            "</body></html>\n",
        ]
    )


def statistics(lengths: Sequence[int], trained: Sequence[int], *, cutoff_len: int) -> list[str]:
    """Numbers over all samples that were looked at, one sentence each."""
    if not lengths:
        return ["no sample is left"]
    ordered = sorted(lengths)
    ninth = ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]
    at_limit = sum(length >= cutoff_len - 2 for length in lengths)
    return [
        f"{len(lengths)} samples of {ordered[0]} to {ordered[-1]} tokens: "
        f"median {median(ordered):.0f}, 90 % up to {ninth}",
        f"{sum(trained) / sum(lengths):.1%} of the tokens are trained",
        f"{at_limit} samples reach cutoff_len ({cutoff_len}) and may have lost a part",
    ]


def heading(number: int, sample: Sample) -> str:
    """The line above a sample."""
    return f"--- sample {number}: {_counts(sample)} ---"


def _counts(sample: Sample) -> str:
    return f"{sample.num_tokens} tokens, {sample.num_trained} trained"
