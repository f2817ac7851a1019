"""Several GPUs and DeepSpeed: against what DeepSpeed itself allocates, measured runs, and what must always hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gathering import as_recorded, follow
from llamafactory_preflight import memory
from llamafactory_preflight.advice import changes, remedies
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.machine import survey
from llamafactory_preflight.memory import Card, MemoryEstimate, Ranks
from llamafactory_preflight.memory.host import PROCESS_BYTES, WORKER_BYTES
from llamafactory_preflight.memory.paper.ledger import Ledger
from llamafactory_preflight.memory.sharding import in_order
from llamafactory_preflight.memory.zero.offload import HostMemory
from llamafactory_preflight.memory.zero.stage2 import flat_group
from llamafactory_preflight.memory.zero.stage3 import Coordinator
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy  # noqa: E402


GIB = 2**30
RECORDED = json.loads((ROOT / "tests" / "recorded_deepspeed.json").read_text())
SOFTWARE = Software(torch="2.11.0", transformers="5.6.0", deepspeed="0.18.4", liger_kernel="0.8.5")
SMALL = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 32000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
WITHOUT_TOKENS = {"cutoff_len": 8, "per_device_train_batch_size": 1, "enable_liger_kernel": True}


def deepspeed(stage: int, *, offload: str = "", pinned: bool = False, **more: Any) -> dict[str, Any]:
    """A configuration; `offload` holds `o` for the optimizer, `p` for parameters."""
    device = {"device": "cpu", "pin_memory": pinned}
    section = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 10**6, **more}
    section |= {"offload_optimizer": device} if "o" in offload else {}
    section |= {"offload_param": device} if "p" in offload else {}
    return {"bf16": {"enabled": "auto"}, "zero_optimization": section}


def predict(world: int = 1, local: int | None = None, **settings: Any) -> MemoryEstimate:
    run = RunDescription(
        **{"model_name_or_path": "m", "bf16": True, "finetuning_type": "full", "gradient_accumulation_steps": 2}
        | WITHOUT_TOKENS
        | settings
    )
    shape = ModelShape.from_config(SMALL)
    ranks = Ranks(world=world, local=world if local is None else local)
    return memory.estimate(run, shape, software=SOFTWARE, ranks=ranks)


def busy(estimate: MemoryEstimate) -> int:
    return max(estimate.phases["forward_backward"], estimate.phases["optimizer_step"])


# against the real thing


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_a_rank_allocates_what_deepspeed_does(name: str) -> None:
    recorded = RECORDED["runs"][name]
    config = recorded["deepspeed"] | {"bf16": {"enabled": True}}
    run = RunDescription(
        model_name_or_path="m", bf16=True, finetuning_type="full", cutoff_len=8, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, deepspeed=config, optim="adamw_torch_fused",
    )  # fmt: skip
    shape = ModelShape.from_config(RECORDED["model"] | {"torch_dtype": "bfloat16"})
    estimate = memory.estimate(run, shape, software=SOFTWARE, card=Card(), ranks=Ranks(world=2, local=2))
    resting = estimate.phases["save"]
    for phase, part in (("forward_backward", "micro_step"), ("optimizer_step", "step")):
        truth = resting + max(rank[part] for rank in recorded["ranks"])
        assert estimate.phases[phase] == pytest.approx(truth, rel=3e-3), part


def _estimate_gathering(recorded: dict[str, Any]) -> None:
    run = RunDescription(
        model_name_or_path="m", bf16=True, finetuning_type="lora" if recorded["lora"] else "full", cutoff_len=8,
        per_device_train_batch_size=1, gradient_accumulation_steps=2,
        deepspeed=recorded["deepspeed"] | {"bf16": {"enabled": True}},
        quantization_bit=4 if recorded.get("quantized") else None,
    )  # fmt: skip
    shape = ModelShape.from_config(RECORDED["model"] | {"torch_dtype": "bfloat16"})
    memory.estimate(run, shape, software=SOFTWARE, ranks=Ranks(world=2, local=2))


@pytest.mark.parametrize("name", RECORDED["gathering"])
def test_parameters_are_gathered_module_by_module_as_deepspeed_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RECORDED["gathering"][name]
    forwards = follow(monkeypatch)
    _estimate_gathering(recorded)
    assert as_recorded(forwards) == recorded["available"]


def test_4_bit_weights_are_kept_for_the_backward_as_bitsandbytes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RECORDED["gathering"]["qlora"]

    def kept(coordinator: Coordinator) -> int:
        packed = {key: views for key, views in coordinator.held.items() if key[1].endswith("_proj")}
        return sum(
            {id(view): coordinator.states[key].numel for key, views in packed.items() for view in views}.values()
        )

    forwards = follow(monkeypatch, kept)
    _estimate_gathering(recorded)
    assert as_recorded(forwards) == recorded["held"]
    assert max(max(numbers) for _, numbers in forwards) > 0


@pytest.mark.parametrize(
    ("name", "peak_gib", "host_gib"), [("z2off_17_full", 7.0991, 40.1827), ("z3off_4_full", 4.1135, 90.5997)]
)
def test_the_measured_deepspeed_runs(name: str, peak_gib: float, host_gib: float) -> None:
    plan = json.loads((accuracy.MEASURED / "calibration" / "cases.json").read_text())
    case = next(case for case in plan["cases"] if case["id"] == name)
    estimate = accuracy.prepare(case, plan["models"])()
    assert busy(estimate) == pytest.approx(peak_gib * GIB, rel=0.005)
    assert estimate.host_training_bytes == pytest.approx(host_gib * GIB, rel=0.03)


# what must hold


def test_states_shrink_with_the_stage_and_with_the_ranks() -> None:
    peaks = [busy(predict(4, deepspeed=deepspeed(stage))) for stage in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)
    assert busy(predict(4)) > peaks[1]
    for stage in (1, 2, 3):
        ranks = [busy(predict(world, deepspeed=deepspeed(stage))) for world in (1, 2, 4, 8)]
        assert ranks == sorted(ranks, reverse=True)


def test_what_is_offloaded_leaves_the_card_and_shows_in_main_memory() -> None:
    plain, optimizer, both = (predict(2, deepspeed=deepspeed(3, offload=name)) for name in ("", "o", "op"))
    assert busy(plain) > busy(optimizer) > busy(both)
    assert plain.host_training_bytes < optimizer.host_training_bytes < both.host_training_bytes
    assert optimizer.components["optimizer"] == 0


@pytest.mark.parametrize("deepspeed_plan", [None, deepspeed(2), deepspeed(3)], ids=["ddp", "zero2", "zero3"])
def test_workers_of_the_data_loader_count_for_every_rank(deepspeed_plan: dict[str, Any] | None) -> None:
    none, four = (predict(2, deepspeed=deepspeed_plan, dataloader_num_workers=workers) for workers in (0, 4))
    assert four.host_training_bytes - none.host_training_bytes == 2 * 4 * WORKER_BYTES


def test_workers_of_the_tokenization_are_gone_when_weights_load() -> None:
    none, few, many = (predict(2, preprocessing_num_workers=number) for number in (None, 1, 256))
    assert none.host_bytes == few.host_bytes < many.host_bytes
    assert many.host_bytes == 2 * PROCESS_BYTES + 256 * WORKER_BYTES
    assert many.host_training_bytes == none.host_training_bytes
    assert predict(2, preprocessing_num_workers=256, streaming=True).host_bytes == none.host_bytes


def test_4_bit_is_whole_on_every_card_until_zero_3_shares_it() -> None:
    four_bit = {"finetuning_type": "lora", "quantization_bit": 4}
    alone, *several = (predict(world, deepspeed=deepspeed(3), **four_bit) for world in (1, 2, 8))
    whole = predict(1, **four_bit).phases["load"]
    for estimate in several:
        assert whole <= estimate.phases["load"] <= alone.phases["load"]
    assert alone.phases["save"] > several[0].phases["save"] > several[1].phases["save"]
    offloaded = predict(2, deepspeed=deepspeed(3, offload="op"), **four_bit)
    assert offloaded.phases["load"] == pytest.approx(whole, rel=0.01)
    assert busy(offloaded) < busy(several[0])
    assert offloaded.host_training_bytes > several[0].host_training_bytes
    told = "Each card loads the whole 4-bit model"
    assert any(reason.startswith(told) for reason in offloaded.reasons)
    assert not any(reason.startswith(told) for reason in predict(2, deepspeed=deepspeed(2), **four_bit).reasons)


def test_without_checkpointing_4_bit_weights_stay_gathered_until_the_backward_is_over() -> None:
    def kept(**more: Any) -> int:
        plan = deepspeed(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
        settings = {"deepspeed": plan, "finetuning_type": "lora"} | more
        found = [predict(2, **settings, disable_gradient_checkpointing=off).phases for off in (True, False)]
        return found[0]["forward_backward"] - found[1]["forward_backward"]

    layers = 8 * (_layer_numel() - 2 * 512 - 2 * 64) // 2
    assert kept(quantization_bit=4) - kept() == pytest.approx(layers, rel=0.1)


def test_zero_3_gathers_the_model_in_main_memory_to_save_it() -> None:
    def saving(**more: Any) -> int:
        found = predict(2, deepspeed=deepspeed(3, **more), cutoff_len=8)
        return found.host_bytes - found.host_training_bytes

    numel = sum(parameter.numel for parameter in in_order(RunDescription(finetuning_type="full"), _shape()))
    assert saving(stage3_gather_16bit_weights_on_model_save=True) == pytest.approx(2 * numel, rel=0.01)
    assert saving(stage3_gather_16bit_weights_on_model_save=False) == 0


def test_a_rank_of_ddp_holds_buckets_beside_its_gradients() -> None:
    alone, together = predict(1), predict(2)
    trained = sum(parameter.numel for parameter in in_order(RunDescription(finetuning_type="full"), _shape()))
    assert busy(together) - busy(alone) == pytest.approx(4 * trained, rel=1e-3)
    assert (alone.nccl_bytes, together.nccl_bytes > 0) == (0, True)
    lora = [busy(predict(world, finetuning_type="lora")) for world in (1, 2)]
    assert 0 < lora[1] - lora[0] < busy(together) - busy(alone)


def test_the_parameters_are_all_there_and_in_order() -> None:
    run = RunDescription(finetuning_type="full")
    everything = in_order(run, _shape())
    assert everything[0].key == (-1, "embed_tokens")
    assert [parameter.key[0] for parameter in everything[1:-1]] == sorted(p.key[0] for p in everything[1:-1])
    assert len({parameter.key for parameter in everything}) == len(everything)
    assert sum(parameter.numel for parameter in everything) == 32000 * 512 + 8 * _layer_numel() + 512


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_flat_groups_are_shared_without_rest(world: int, round_robin: bool) -> None:
    group = [item for item in in_order(RunDescription(finetuning_type="full"), _shape()) if item.decays]
    ranks = [flat_group(group, world=world, rank=rank, round_robin=round_robin) for rank in range(world)]
    assert {flat.numel for flat in ranks} == {ranks[0].partition * world}
    for number, item in enumerate(group):
        assert sum(flat.shares[number].mine for flat in ranks) == item.numel


def test_gathered_parameters_are_let_go_and_kept_within_the_reuse_distance() -> None:
    ledger = Ledger(expandable_segments=True)
    everything = in_order(RunDescription(finetuning_type="full"), _shape())
    keys = [parameter.key for parameter in everything if parameter.key[1] == "down_proj"]

    def highest(reuse: int) -> int:
        section = {"stage": 3, "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 0}
        plan = ZeroPlan.from_config({"zero_optimization": section}, hidden_size=512)
        coordinator = Coordinator(ledger, everything, plan, world=2, item=2)
        ledger.take_peak()
        for _ in range(2):
            coordinator.begin_forward()
            for key in [*keys, *reversed(keys)]:
                coordinator.enter("own", key)
                coordinator.leave("own", key)
        return ledger.take_peak()[0]

    assert highest(10**9) > highest(0) > 0


def test_page_locked_blocks_are_powers_of_two_and_come_back() -> None:
    host = HostMemory()
    host.unpin(host.pin(5 * 2**20))
    assert (host.pinned, host.pin(7 * 2**20), host.pinned) == (2**23, 2**23, 2**23)
    assert host.pin(2**23 + 1) == 2**24


def test_a_bucket_is_alive_while_gradients_come() -> None:
    sizes = (10**5, 10**8)
    small, large = (
        predict(2, deepspeed=deepspeed(2, reduce_bucket_size=size)).phases["forward_backward"] for size in sizes
    )
    assert large - small == pytest.approx(2 * 10**8, rel=0.2)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"deepspeed": deepspeed(2), "bf16": False, "pure_bf16": True}, "float32"),
        ({"deepspeed": deepspeed(2) | {"tensor_parallel": {"autotp_size": 2}}}, "tensor_parallel"),
        ({"deepspeed": deepspeed(3, zero_hpz_partition_size=8)}, "zero_hpz_partition_size"),
        ({"deepspeed": deepspeed(2), "stage": "ppo"}, "PPO"),
    ],
)
def test_what_has_no_formula_is_said(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(Unmodelled, match=word):
        predict(2, **settings)


def test_the_launcher_decides_how_many_train_together() -> None:
    assert survey.ranks_of(2, env={}) == Ranks(world=2, local=2)
    assert survey.ranks_of(8, env={"NNODES": "2", "NPROC_PER_NODE": "4"}) == Ranks(world=8, local=4)
    assert survey.ranks_of(1, env={"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}) == Ranks(world=16, local=8)
    assert survey.ranks_of(0, env={"NNODES": "many"}) == Ranks(world=1, local=1)


FILES = tuple(
    changes.DeepSpeedFile(f"zero{stage}{'_offload' * bool(offload)}.json", deepspeed(stage, offload=offload))
    for stage, offload in ((2, ""), (3, ""), (2, "o"), (3, "op"))
)


def test_zero_is_proposed_to_several_gpus_by_its_file() -> None:
    run = RunDescription(
        model_name_or_path="m", bf16=True, finetuning_type="full", gradient_accumulation_steps=2, optim="adamw_torch",
        **WITHOUT_TOKENS,
    )  # fmt: skip
    found = remedies.remedies(
        run,
        "qwen3",
        software=SOFTWARE,
        predict=lambda changed: memory.estimate(changed, _shape(), software=SOFTWARE, ranks=Ranks(world=4, local=4)),
        fits=lambda estimate: estimate.peak_allocated_bytes < 0.5 * busy(predict(4)),
        shards=FILES,
    )
    lines = [remedy.line for remedy in found if "deepspeed" in remedy.set]
    assert len(lines) == 1
    assert "deepspeed=zero" in lines[0]


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({}, [2, 3, 2, 3]),
        ({"quantization_bit": 4, "finetuning_type": "lora"}, [2, 3, 2, 3]),
        ({"quantization_bit": 8, "finetuning_type": "lora"}, [2, 2]),
        ({"quantization_bit": 4, "quantization_method": "hqq", "finetuning_type": "lora"}, [2, 2]),
        ({"pissa_init": True, "finetuning_type": "lora"}, [2, 2]),
        ({"pure_bf16": True}, []),
        ({"use_galore": True}, []),
        ({"deepspeed": deepspeed(2)}, []),
    ],
)
def test_zero_is_proposed_only_where_llamafactory_takes_it(settings: dict[str, Any], stages: list[int]) -> None:
    run = RunDescription(model_name_or_path="m", optim="adamw_torch", **settings)
    proposed = [change.set["deepspeed"] for change in changes.sharding(run, FILES)]
    assert [file["zero_optimization"]["stage"] for file in proposed] == stages


def _shape() -> ModelShape:
    return ModelShape.from_config(SMALL)


def _layer_numel() -> int:
    attention = 512 * 512 + 2 * 512 * 256 + 512 * 512
    return attention + 3 * 512 * 1536 + 2 * 512 + 2 * 64
