"""BAdam: every step of a measured run, and which layers a run reaches with which states."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import preflight
from llamafactory_preflight.memory import Card, Ranks, badam
from llamafactory_preflight.memory.estimators.base import Estimator
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software
from test_memory import QWEN3


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from measure_runs import DEFAULTS  # noqa: E402


GIB = 2**30
FOLDER = ROOT / "tests" / "measured" / "held_out_3"
SOFTWARE = Software(torch="2.11.0", transformers="5.6.0", liger_kernel="0.8.5")
RUN = RunDescription(
    model_name_or_path="m", do_train=True, finetuning_type="full", use_badam=True, bf16=True, template="qwen3"
)


def reached(**settings: Any) -> set[tuple[int, bool]]:
    """Number of the layer, and whether it has states already."""
    return {(visit.block, not visit.first) for visit in badam.fullest(replace(RUN, **settings), 4)}


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, {(0, False), (0, True)}),
        ({"max_steps": 1}, {(0, False)}),
        ({"badam_switch_interval": 1}, {(0, False)}),
        ({"badam_switch_interval": -1, "max_steps": 900}, {(0, False)}),
        ({"badam_switch_interval": 2, "max_steps": 4}, {(0, False), (1, True)}),
        ({"badam_switch_interval": 2, "max_steps": 9}, {(0, False), (0, True)}),
        ({"badam_switch_mode": "descending", "badam_switch_interval": 2, "max_steps": 4}, {(1, False), (2, True)}),
        ({"badam_start_block": 2, "badam_switch_interval": 10, "max_steps": 9}, {(2, False), (2, True)}),
        ({"badam_start_block": -1, "badam_switch_interval": 10, "max_steps": 10}, {(0, False), (3, True)}),
        ({"badam_start_block": 2, "badam_switch_mode": "fixed"}, {(2, False), (2, True)}),
        ({"badam_switch_mode": "random", "max_steps": 5}, {(0, False), (0, True)}),
    ],
)
def test_the_lowest_layers_of_a_run_are_those_that_its_steps_reach(
    settings: dict[str, Any], layers: set[tuple[int, bool]]
) -> None:
    assert reached(**settings) == layers


def test_every_step_of_the_measured_run_is_predicted() -> None:
    plan = json.loads((FOLDER / "cases.json").read_text())
    case = next(case for case in plan["cases"] if case["id"] == "h3_badam_17_lg")
    rows = map(json.loads, (FOLDER / "measured.jsonl").read_text().splitlines())
    measured = next(row for row in rows if row["id"] == case["id"])
    given = {"model_name_or_path": "m", "output_dir": "out", "dataset": "rows"}
    run = from_arguments(DEFAULTS | case["args"] | given, software=SOFTWARE, origin="case")
    shape = ModelShape.from_config(plan["models"][case["model"]])
    card = Card(compute_capability=(9, 0), expandable_segments=True)
    steps = [(1, 0), (2, 1), (3, 1), (4, 2)]  # number and layer: the second step of layer 1 alone finds states
    peaks = [
        Estimator(
            replace(run, max_steps=2 if number == 3 else 1, badam_start_block=layer, badam_switch_interval=3),
            shape, SOFTWARE, card, None, Ranks(),
        ).phases()[0]
        for number, layer in steps
    ]  # fmt: skip
    assert [phase["forward_backward"] / GIB for phase in peaks] == pytest.approx(
        measured["step_peak_allocated_gib"], abs=1e-4
    )
    assert peaks[0]["load"] / GIB == pytest.approx(measured["loaded_allocated_gib"], abs=1e-4)


def test_a_run_that_does_not_fit_gets_remedies_that_keep_badam_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    run = {"model_name_or_path": str(tmp_path), "do_train": True, "dataset": "rows", "template": "qwen3", "bf16": True}
    run |= {"output_dir": "out", "finetuning_type": "full", "use_badam": True, "cutoff_len": 8192}
    result = preflight.check(run, gpu="24GiB", host_ram="256GiB")
    assert result.verdict.word == "will_not_fit" and result.remedies
    assert not any({"optim", "pure_bf16", "deepspeed"} & remedy.set.keys() for remedy in result.remedies)
    assert all(remedy.set.get("use_badam") is False for remedy in result.remedies if "finetuning_type" in remedy.set)
