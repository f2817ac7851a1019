from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.parallel.zero import ZeroPlan


def plan(**section: object) -> ZeroPlan:
    return ZeroPlan.from_config({"zero_optimization": section}, hidden_size=1000)


def test_auto_follows_transformers() -> None:
    zero = plan(
        stage=3,
        reduce_bucket_size="auto",
        stage3_prefetch_bucket_size="auto",
        stage3_param_persistence_threshold="auto",
    )
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.persistence_threshold) == (10**6, 900_000, 10_000)


def test_written_sizes_win_and_may_be_in_scientific_notation() -> None:
    zero = plan(stage=2, reduce_bucket_size=2e8, allgather_bucket_size=100)
    assert (zero.reduce_bucket_size, zero.allgather_bucket_size) == (200_000_000, 100)


@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (2, False), (3, True)])
def test_overlap_defaults_to_true_for_stage_3_only(stage: int, overlap: bool) -> None:
    assert plan(stage=stage).overlap_comm is overlap
    assert plan(stage=stage, overlap_comm=not overlap).overlap_comm is not overlap


def test_parameter_offload_counts_in_stage_3_only() -> None:
    section = {"offload_param": {"device": "cpu", "pin_memory": True}, "offload_optimizer": {"device": "cpu"}}
    assert plan(stage=2, **section).offload_param == "none"
    zero = plan(stage=3, **section)
    assert (zero.offload_param, zero.offload_optimizer, zero.pin_memory) == ("cpu", "cpu", True)


def test_no_section_is_stage_0() -> None:
    assert ZeroPlan.from_config({}, hidden_size=8).stage == 0


def test_all_faults_come_in_one_message() -> None:
    with pytest.raises(UserError) as caught:
        plan(stage=5, reduce_bucket_size="big", offload_optimizer={"device": "disk"}, sub_group_size=True)
    for key in ("stage", "reduce_bucket_size", "offload_optimizer", "sub_group_size"):
        assert f"`{key}" in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [{"stage": [3]}, {"offload_optimizer": {"device": ["cpu"]}}, {"reduce_bucket_size": float("nan")}],
)
def test_values_of_another_kind(section: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"`{next(iter(section))}"):
        plan(**{"stage": 2} | section)


def test_a_section_that_is_no_object() -> None:
    with pytest.raises(UserError, match="is not an object"):
        ZeroPlan.from_config({"zero_optimization": 3}, hidden_size=8)


def test_every_shipped_json_is_read(root: Path) -> None:
    files = sorted((root / "deepspeed_configs").glob("*.json"))
    stages = {file.name: ZeroPlan.from_config(json.loads(file.read_text()), hidden_size=4096).stage for file in files}
    assert stages and set(stages.values()) <= {2, 3}
