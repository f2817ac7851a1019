"""Formula and simulation agree: twenty runs of the committed grid, which meet every option of every axis."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import compare_oracle  # noqa: E402
from compare_oracle import AXES, Row  # noqa: E402


NUM_RUNS = 20
TOLERANCE = 0.01
ROWS = [row for row in compare_oracle.read().values() if not row.unknown]


def chosen() -> Iterator[Row]:
    """Rows one by one, each the one that meets most of what was met least so far."""
    left, met = list(ROWS), Counter[tuple[str, str]]()
    for _ in range(NUM_RUNS):
        best = max(left, key=lambda row: sum(0.01 ** met[option] for option in row.labels.items()))
        met.update(best.labels.items())
        left.remove(best)
        yield best


CHOSEN = list(chosen())


def test_the_chosen_runs_meet_every_option() -> None:
    met = {option for row in CHOSEN for option in row.labels.items()}
    assert met == {(axis, label) for axis, options in AXES.items() for label in options}


@pytest.mark.parametrize("package", ["liger-kernel", "bitsandbytes"])
def test_the_environment_can_simulate_every_run(package: str) -> None:
    assert metadata.version(package)  # a part of the `test` extra: nothing here is skipped without it


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: ", ".join(row.labels.values()))
def test_formula_and_simulation_agree(row: Row) -> None:
    found = compare_oracle.compare(row.labels)
    assert not found.unknown
    assert abs(found.difference) <= TOLERANCE, compare_oracle.as_line(found)


def test_the_committed_table_is_the_one_of_its_rows() -> None:
    assert len(ROWS) >= 300
    assert compare_oracle.TABLE.with_suffix(".md").read_text() == compare_oracle.table(
        list(compare_oracle.read().values())
    )


def test_the_grid_is_generated_alike_every_time() -> None:
    first = [json.dumps(labels) for labels in compare_oracle.configurations(50)]
    assert first == [json.dumps(labels) for labels in compare_oracle.configurations(50)]
    assert len(set(first)) == 50
    assert {tuple(labels.values()) for labels in compare_oracle.configurations()} == set(compare_oracle.read())
