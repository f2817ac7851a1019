"""Shortens a prompt inside what users and tools said: never a header, a system text, or the end of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchors:
    """Token ids between which a user's text stands.

    Attributes:
        start: Opens a turn.
        end: Closes it.
        user: The role's name after `start`.
        walls: Tokens that must not be cut away: media, and the tags of tool results.
    """

    start: int
    end: int
    user: int
    walls: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Anchors:
        """Reads them from the tokenizer."""
        names = ("<|im_start|>", "<|im_end|>", "user", "<tool_response>", "</tool_response>")
        start, end, user, *walls = tokenizer.convert_tokens_to_ids(list(names))
        media = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        return cls(start=start, end=end, user=user, walls=frozenset([*walls, *tokenizer.convert_tokens_to_ids(media)]))


def cut_prompt(ids: Sequence[int], limit: int, anchors: Anchors) -> list[int] | None:
    """The prompt in at most `limit` tokens: the last question loses its beginning first, then earlier ones.

    Returns:
        None if that is not enough.
    """
    kept = list(ids)
    for first, last in reversed(_spans(kept, anchors)):
        excess = len(kept) - limit
        if excess <= 0:
            break
        del kept[first : min(first + excess, last - 1)]  # one token stays, so that no turn is empty
    return kept if len(kept) <= limit else None


def _spans(ids: Sequence[int], anchors: Anchors) -> list[tuple[int, int]]:
    """Where texts stand that may be cut: half-open ranges of at least two tokens."""
    spans = []
    position = 0
    while position < len(ids):
        if ids[position] == anchors.start and list(ids[position + 1 : position + 2]) == [anchors.user]:
            first = position + 3  # after the header and its line break
            position = first
            while position < len(ids) and ids[position] != anchors.end:
                if ids[position] in anchors.walls:
                    spans.append((first, position))
                    first = position + 1
                position += 1
            spans.append((first, position))
        position += 1
    return [(first, last) for first, last in spans if last - first > 1]
