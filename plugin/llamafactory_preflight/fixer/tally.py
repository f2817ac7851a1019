"""Counts what becomes of a dataset: samples that are lost, and in which mode the others are trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamafactory_preflight.fixer import prepare, session


NUM_NAMED = 5
MANY_LOST = 0.05


@dataclass(kw_only=True, slots=True)
class Tally:
    """What the preparation found.

    Attributes:
        num_samples: Conversations.
        num_think: Trained answers with reasoning.
        num_no_think: Trained answers without.
        lost: Indices of samples that are left out, by reason.
        odd: Indices of samples that are kept although something is strange.
        rows: Of each sample that is kept, the conversation that it comes from.
    """

    num_samples: int = 0
    num_think: int = 0
    num_no_think: int = 0
    lost: dict[str, list[int]] = field(default_factory=dict)
    odd: dict[str, list[int]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> Tally:
        """Counts rows that carry what the preparation wrote into them."""
        tally = cls()
        before = None
        for row in rows:
            index = row[prepare.INDEX]
            tally.num_samples += index != before
            if not row[prepare.LOST]:
                tally.rows.append(index)
            tally.num_think += row[prepare.THINK]
            tally.num_no_think += row[prepare.NO_THINK]
            for reason, found in ((row[prepare.LOST], tally.lost), (row[prepare.ODD], tally.odd)):
                if reason and index != before:
                    found.setdefault(reason, []).append(index)
            before = index
        return tally

    @property
    def num_rows(self) -> int:
        """Samples that the conversations became."""
        return len(self.rows)

    @property
    def num_lost(self) -> int:
        """Samples that are left out."""
        return sum(map(len, self.lost.values()))

    @property
    def num_kept_samples(self) -> int:
        """Conversations that are not left out."""
        return self.num_samples - self.num_lost


def tell_lost(tally: Tally, *, which: str, is_part: bool, places: Sequence[int] | None = None) -> None:
    """One line for each reason why samples are left out, or are strange.

    Args:
        tally: What was counted.
        which: The dataset's use.
        is_part: Whether only the first samples were looked at.
        places: Where each sample stood before LLaMA-Factory split off the evaluation data, if it did.
    """
    order = " of the shuffled stream" if is_part else ""
    seen = f"the first {tally.num_samples} samples" if is_part else f"{tally.num_samples} samples"
    for found, fate in ((tally.lost, "left out"), (tally.odd, "kept")):
        for reason, indices in found.items():
            at = sorted(indices if places is None else (places[index] for index in indices))
            named = ", ".join(map(str, at[:NUM_NAMED])) + (", ..." if len(at) > NUM_NAMED else "")
            session.say(f"{len(at)} of {seen} for {which} {fate}: {reason} (index {named}{order})")


def tell_too_long(num_seen: int, num_kept: int, *, is_part: bool) -> None:
    """How many samples are left out because of what cannot be cut: the answer, a system text, tools."""
    if num_kept < num_seen:
        seen = f"the first {num_seen} samples" if is_part else f"{num_seen} samples"
        session.say(
            f"{num_seen - num_kept} of {seen} left out: even without the user's text they are longer than cutoff_len"
        )


def tell_if_many(tally: Tally, num_seen: int, num_kept: int, *, which: str) -> None:
    """Says so if much of the data is lost, whatever the reason.

    Args:
        tally: What was lost before the tokenization.
        num_seen: Samples that were tokenized.
        num_kept: Those of them that are trained.
        which: The dataset's use.
    """
    share = 1 - tally.num_kept_samples / max(1, tally.num_samples) * (num_kept / max(1, num_seen))
    if tally.num_samples and share > MANY_LOST:
        session.say(f"{share:.0%} of the data for {which} is lost. The lines above tell why")


def tell_cost(tally: Tally, lengths: list[int]) -> None:
    """What taking conversations apart costs, once it is known how long the samples are."""
    grown = tally.num_rows / max(1, tally.num_kept_samples)
    if grown <= 1:
        return
    tokens = ""
    if len(lengths) == len(tally.rows):  # not packed
        last = dict(zip(tally.rows, lengths, strict=True))  # the last sample of a conversation holds the others
        tokens = f" and {sum(lengths)} tokens instead of about {sum(last.values())}"
    session.say(
        f"{tally.num_kept_samples} conversations became {tally.num_rows} samples{tokens}, because an earlier answer "
        f"is served otherwise than the last one. An epoch has {grown:.2f} times the steps, and mixing ratios count "
        "answers. LLAMAFACTORY_TEMPLATE_TURNS=last trains the last answers only, =concat all of them in one text"
    )
