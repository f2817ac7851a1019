"""What to change when a run does not fit: what costs nothing first, then one change more, then a combination.

Each change is tried on the prediction itself; none is offered that LLaMA-Factory would refuse with the rest of the
settings or that needs a package which is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from llamafactory_preflight.advice.changes import Change, DeepSpeedFile, changes
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.phrases import joined
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


Predict = Callable[[RunDescription], MemoryEstimate]
Fits = Callable[[MemoryEstimate], bool]
Candidates = Callable[[RunDescription], Iterable[Change]]

FEW_RUNGS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change.

    Attributes:
        set: Arguments by LLaMA-Factory's names.
        costs: What it costs the user, in words.
        estimate: The prediction with it.
    """

    set: Mapping[str, Any]
    costs: str
    estimate: MemoryEstimate

    @property
    def line(self) -> str:
        """The change as it is appended to a command line."""
        return " ".join(items(self.set))


def remedies(
    run: RunDescription,
    model_type: str,
    *,
    software: Software,
    predict: Predict,
    fits: Fits,
    shards: Sequence[DeepSpeedFile] = (),
    kept: frozenset[str] = frozenset(),
    has_bf16: bool = True,
) -> tuple[Remedy, ...]:
    """Finds what makes a run fit.

    Args:
        run: The run that does not fit.
        model_type: The model's type, for what depends on its code.
        software: Installed versions.
        predict: Predicts a changed run.
        fits: Whether a prediction is within the budget for certain.
        shards: DeepSpeed files that several ranks could use, the least costly first.
        kept: Arguments that stay as they are, except for changes that cost nothing.
        has_bf16: Whether the card computes in bf16.

    Returns:
        What costs nothing, if that suffices; else every single change that suffices with it, the least costly first;
        else the shortest prefix of all changes that does, without those that turn out not to be needed.
    """

    def candidates(changed: RunDescription) -> Iterator[Change]:
        found = changes(changed, model_type, software=software, shards=shards, has_bf16=has_bf16)
        return (change for change in found if change.free or not kept & change.set.keys())

    search = _Search(run, predict, fits)
    free = [change for change in candidates(run) if change.free]
    if free:
        remedy = search.fitting(free)
        if remedy is not None:
            return (remedy,)
    ladders = _ladders(candidates(replace(run, **_merged(free))))
    single = [search.mildest(rungs, beside=free) for rungs in ladders if not rungs[0].free]
    if any(single):
        return tuple(remedy for remedy in single if remedy is not None)
    combined = _combination(search, candidates)
    return () if combined is None else (combined,)


class _Search:
    """Tries changes on the prediction and remembers it: under DeepSpeed one takes a tenth of a second.

    Args:
        run: The run that does not fit.
        predict: Predicts a changed run.
        fits: Whether a prediction is within the budget for certain.
    """

    def __init__(self, run: RunDescription, predict: Predict, fits: Fits) -> None:
        self.run, self._predict, self._fits = run, predict, fits
        self._known: dict[str, MemoryEstimate | None] = {}

    def tried(self, taken: Sequence[Change]) -> Remedy | None:
        """The run with some changes, or None where that has no formula."""
        changed = _merged(taken)
        printed = {key: value.path if isinstance(value, DeepSpeedFile) else value for key, value in changed.items()}
        key = repr(sorted(printed.items()))
        if key not in self._known:
            try:
                self._known[key] = self._predict(replace(self.run, **changed))
            except Unmodelled:
                self._known[key] = None
        estimate = self._known[key]
        paid = [change for change in taken if not change.free]
        costs = joined("; ", (change.costs for change in paid or taken))
        return None if estimate is None else Remedy(set=printed, costs=costs, estimate=estimate)

    def fitting(self, taken: Sequence[Change]) -> Remedy | None:
        """The run with some changes, or None where it does not fit."""
        remedy = self.tried(taken)
        return remedy if remedy is not None and self._fits(remedy.estimate) else None

    def mildest(self, rungs: Sequence[Change], *, beside: Sequence[Change]) -> Remedy | None:
        """The first rung that the run fits with, or None."""
        found = self.mildest_rung(rungs, beside=beside)
        return None if found is None else self.fitting([*beside, found])

    def mildest_rung(self, rungs: Sequence[Change], *, beside: Sequence[Change]) -> Change | None:
        """As `mildest`, but the rung itself."""
        if len(rungs) <= FEW_RUNGS:  # DeepSpeed's files among them, which need not take less one after the other
            return next((rung for rung in rungs if self.fitting([*beside, rung])), None)
        if not self.fitting([*beside, rungs[-1]]):
            return None
        first, last = 0, len(rungs) - 1
        while first < last:
            middle = (first + last) // 2
            if self.fitting([*beside, rungs[middle]]):
                last = middle
            else:
                first = middle + 1
        return rungs[last]


def _combination(search: _Search, candidates: Candidates) -> Remedy | None:
    """Adds changes in order until the run fits, then takes back or weakens each one, the costliest first."""
    taken: dict[str, Change] = {}
    ladders: dict[str, list[Change]] = {}
    smallest = search.tried([])
    assert smallest is not None  # the run as it is was predicted
    done = False
    while not done:
        current = replace(search.run, **_merged(taken.values()))
        for rungs in _ladders(candidates(current)):
            name = _key(rungs[0])
            if name in taken:
                continue
            ladders[name] = rungs
            beside = list(taken.values())
            mildest = search.mildest_rung(rungs, beside=beside)
            if mildest is not None:
                taken[name], done = mildest, True
                break
            tried = [(remedy, rung) for rung in rungs[-FEW_RUNGS:] if (remedy := search.tried([*beside, rung]))]
            if tried:
                remedy, rung = min(tried, key=lambda pair: _largest(pair[0]))
                if _largest(remedy) < _largest(smallest):
                    taken[name], smallest = rung, remedy
                    break
        else:
            return None
    for name in reversed(tuple(taken)):
        rest = [change for other, change in taken.items() if other != name]
        if search.fitting(rest):
            taken.pop(name)
        else:
            milder = search.mildest_rung(ladders[name], beside=rest)
            taken[name] = milder or taken[name]
    return search.fitting(list(taken.values()))


def _ladders(candidates: Iterable[Change]) -> Iterator[list[Change]]:
    """Changes of one argument, the mildest first."""
    for _, rungs in groupby(candidates, key=_key):
        yield list(rungs)


def _key(change: Change) -> str:
    return next(iter(change.set))


def _merged(taken: Iterable[Change]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for change in taken:
        merged |= change.set
    return merged


def _largest(remedy: Remedy) -> int:
    return max(remedy.estimate.phases.values())


def items(changed: Mapping[str, Any]) -> list[str]:
    """Arguments as they are written on a command line."""
    return [f"{key}={as_text(value)}" for key, value in changed.items()]


def as_text(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
