"""Stages and models that DeepSpeed shards: what is gathered against real runs, and what must always hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gathering import follow
from llamafactory_preflight import memory
from llamafactory_preflight.memory import MemoryEstimate, Ranks, parameters, sharding
from llamafactory_preflight.memory.estimators.base import evaluates
from llamafactory_preflight.memory.layers import loss
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, run_backward
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from test_memory import MOE, VISION
from test_multi_gpu import ROOT, SMALL, SOFTWARE, busy, deepspeed, predict


sys.path.insert(0, str(ROOT / "scripts"))

from measure_runs import DEFAULTS


RECORDED = json.loads((Path(__file__).parent / "recorded_stages.json").read_text())
VALUE_HEAD_BIAS = 1
"""TRL's model looks at the weight of its head only, and the formula takes the bias along."""


def of(config: dict[str, Any], world: int = 2, **settings: Any) -> MemoryEstimate:
    run = RunDescription(**{"model_name_or_path": "m", "bf16": True, "cutoff_len": 256} | settings)
    ranks = Ranks(world=world, local=world)
    return memory.estimate(run, ModelShape.from_config(config), software=SOFTWARE, ranks=ranks)


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_each_forward_gathers_what_it_does_in_llamafactory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RECORDED["runs"][name]
    forwards = follow(monkeypatch)
    args = DEFAULTS | RECORDED["args"] | recorded["args"]
    args |= {"model_name_or_path": "m", "dataset": "rows", "output_dir": "out"}
    shape = ModelShape.from_config(RECORDED["models"][recorded["model"]])
    run = from_arguments(args, software=SOFTWARE, origin=name)
    memory.estimate(run, shape, software=SOFTWARE, ranks=Ranks(world=2, local=2))
    truth = recorded["forwards"]
    if evaluates(run):  # two steps and two batches that are evaluated, which is predicted after training alone
        count = 4 * len({forward["engine"] for forward in truth})
        forwards, truth = forwards[-count:], truth[:count]
    engines = list(dict.fromkeys(engine for engine, _ in forwards))
    assert [engines.index(engine) for engine, _ in forwards] == [forward["engine"] for forward in truth]
    for (_, found), forward in zip(forwards, truth, strict=True):
        available = [int(number) for number in forward["available"].split()]
        assert found == pytest.approx(available, rel=0, abs=VALUE_HEAD_BIAS)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
@pytest.mark.parametrize("zero", [2, 3])
def test_a_second_model_lies_beside_the_trained_one_and_is_sharded_by_zero_3_only(stage: str, zero: int) -> None:
    sft = predict(2, stage="sft", deepspeed=deepspeed(zero))
    found = predict(2, stage=stage, deepspeed=deepspeed(zero))
    copy = 2 * sum(parameter.numel for parameter in sharding.frozen(_small()))
    assert found.phases["save"] - sft.phases["save"] == pytest.approx(copy // (2 if zero == 3 else 1), rel=0.01)


def test_adapters_need_no_second_model() -> None:
    lora = {"finetuning_type": "lora", "deepspeed": deepspeed(3)}
    alone = predict(2, stage="sft", per_device_train_batch_size=2, **lora)
    assert predict(2, stage="dpo", **lora).phases["save"] == alone.phases["save"]
    named = predict(2, stage="dpo", ref_model="m", **lora)
    assert named.phases["save"] > predict(2, stage="dpo", **lora).phases["save"]


def test_a_second_model_that_is_offloaded_shows_in_main_memory() -> None:
    sft, dpo = (predict(2, stage=stage, deepspeed=deepspeed(3, offload="op")) for stage in ("sft", "dpo"))
    copy = 2 * sum(parameter.numel for parameter in sharding.frozen(_small()))
    assert dpo.host_training_bytes - sft.host_training_bytes == pytest.approx(copy, rel=0.02)


def test_without_checkpointing_a_reference_keeps_the_trained_model_gathered() -> None:
    """Its forward makes DeepSpeed's hooks miscount, and the backward lets nothing go."""
    settings = {"finetuning_type": "lora", "disable_gradient_checkpointing": True}
    section = deepspeed(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    alone, compared = (
        predict(2, stage="dpo", pref_loss=kind, deepspeed=section, **settings) for kind in ("simpo", "sigmoid")
    )
    whole = 2 * sum(parameter.numel for parameter in sharding.frozen(_small()))
    assert compared.phases["forward_backward"] - alone.phases["forward_backward"] > whole // 2


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_an_evaluation_takes_what_a_rank_holds_and_gathers(stage: str) -> None:
    settings = {"stage": stage, "val_size": 0.1, "eval_strategy": "steps", "per_device_eval_batch_size": 1}
    for zero in (2, 3):
        ranks = [predict(world, deepspeed=deepspeed(zero), **settings).phases for world in (1, 2, 8)]
        assert [phases["evaluate"] for phases in ranks] == sorted((p["evaluate"] for p in ranks), reverse=True)
        assert all(phases["save"] < phases["evaluate"] <= phases["forward_backward"] for phases in ranks)


def test_a_reward_model_has_a_head_that_is_trained() -> None:
    for zero in (2, 3):
        lora, rm = (predict(2, stage=s, finetuning_type="lora", deepspeed=deepspeed(zero)) for s in ("sft", "rm"))
        assert busy(rm) > 0 and 0 < rm.phases["save"] - lora.phases["save"] < 2**20


def test_adapters_beside_experts_gather_a_layer_of_them_and_stack_all_in_main_memory() -> None:
    settings = {"finetuning_type": "lora", "deepspeed": deepspeed(3)}
    found, alone = (of(MOE, world, **settings) for world in (2, 1))
    shape = ModelShape.from_config(MOE)
    _, gate_up, down = parameters.expert_tensors(shape)
    layer, shards = 2 * (gate_up + down), [estimate.phases["optimizer_step"] for estimate in (alone, found)]
    assert found.phases["forward_backward"] - found.phases["optimizer_step"] > 2 * layer
    assert shards[0] > 1.8 * shards[1]
    assert found.host_training_bytes > 2 * 2 * shape.num_layers * (gate_up + down)
    assert found.host_training_bytes == pytest.approx(2 * alone.host_training_bytes, rel=0.01)


def test_a_vision_tower_lies_whole_on_each_card_under_zero_2() -> None:
    text = VISION["text_config"] | {"model_type": "qwen3"}
    one, other = (of(config, finetuning_type="lora", deepspeed=deepspeed(2)) for config in (VISION, text))
    vision = ModelShape.from_config(VISION).vision
    assert vision is not None
    assert one.phases["save"] - other.phases["save"] == pytest.approx(2 * vision.numel, rel=0.01)
    full = [of(VISION, world, finetuning_type="full", deepspeed=deepspeed(2)) for world in (1, 2, 4)]
    assert [busy(estimate) for estimate in full] == sorted(map(busy, full), reverse=True)


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_smoothed_loss_allocates_what_transformers_does(sequences: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile
    from transformers.trainer_pt_utils import LabelSmoother

    rows, vocabulary = 128 * sequences, 8192
    logits = torch.zeros(sequences, 128, vocabulary, requires_grad=True)
    labels = torch.zeros(sequences, 128, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=True)
    live = real = 0
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            real = max(real, live)
    ledger = Ledger(expandable_segments=True)
    ops = Ops(ledger, autocast_dtype=None)
    given = ops.empty(rows * vocabulary, FLOAT32, "logits")
    given.node = Leaf()
    before = ledger.live
    result = loss.smoothed_cross_entropy(ops, given, whole=sequences == 1)
    assert ledger.take_peak()[0] - before == pytest.approx(real, rel=0.02)
    assert result.node is not None
    run_backward(result.node, ops.storage(4))


def test_smoothed_labels_keep_the_logits_that_liger_would_not_make() -> None:
    plain, smoothed = (
        predict(1, finetuning_type="lora", cutoff_len=512, label_smoothing_factor=factor) for factor in (0.0, 0.1)
    )
    assert smoothed.components["logits"] >= 3 * 4 * 32000 * 511 > plain.components["logits"]


def _small() -> ModelShape:
    return ModelShape.from_config(SMALL)
