"""Looks at the run that the board's fields describe now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight import device as cards
from llamafactory_preflight import preflight
from llamafactory_preflight.board.lookup import Lookup, StillAsking
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.machine import host, survey
from llamafactory_preflight.model.hub import ModelSource
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Result
from llamafactory_preflight.settings import GPU_VARIABLE, Settings


MODELS = Lookup()


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look.

    Attributes:
        result: What was found out.
        asking: Whether the hub has yet to say what the model is.
    """

    result: Result
    asking: bool

    @property
    def may_have_remedies(self) -> bool:
        """Whether a second look is worth its time."""
        return self.result.device is not None and self.result.verdict.word in ("tight", "will_not_fit")


def look(arguments: Mapping[str, Any], *, card: str = "", num_cards: Any = None, proposes: bool = False) -> Look:
    """Tells what a run will take.

    Args:
        arguments: As the board would pass them to the training.
        card: A card to plan for, as `--gpu` takes it; empty for this machine, as the training will find it.
        num_cards: How many of them; empty for all of this machine, or one that is planned for.
        proposes: Whether remedies are looked for.

    Raises:
        UserError: An argument or the card makes no sense.
    """
    asking = False

    def find(name: str, **named: Any) -> ModelSource:
        nonlocal asking
        try:
            return MODELS.find(name, **named)
        except StillAsking:
            asking = True
            raise

    here = Settings.from_environment().gpu
    planned = cards.planned(gpu=card, where="") if card else cards.planned(gpu=here, where=GPU_VARIABLE)
    # As the board starts the training.
    environ = os.environ | ({"FORCE_TORCHRUN": "1"} if arguments.get("deepspeed") else {})
    result = preflight.examine(
        arguments,
        origin="the fields",
        beside=None,
        devices=survey.taking_part(planned, gpus=_count(num_cards, planned is not None)),
        host_budget_bytes=host.available_bytes(),
        here=host.main_memory(),
        environ=environ,
        proposes=proposes,
        find=find,
    )
    return Look(result=result, asking=asking)


def _count(given: Any, planned: bool) -> int | None:
    if given in (None, "", 0):
        return None
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = 0.5
    if number != int(number) or not 1 <= number <= survey.MOST_GPUS:
        what = phrase("{value} is not a number of GPUs", value=given)
        raise UserError(what, next_step=phrase("Give 1 to {most}", most=survey.MOST_GPUS))
    here = len(cards.visible())
    if not planned and 0 < here < number:
        what = phrase("Only {num} GPUs are found here", num=here)
        raise UserError(what, next_step="Choose a card to plan for more")
    return int(number)
