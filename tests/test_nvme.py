"""Offloading to an NVMe: against the files, buffers and gathered parameters of real runs, and what must always hold.

`recorded_nvme.json` is of two ranks of DeepSpeed on the CPU (scripts/record_nvme.py): nothing here was measured on a
GPU, so its figure there has wide bounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gathering import as_recorded, follow
from llamafactory_preflight import memory
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.machine import disk
from llamafactory_preflight.memory import MemoryEstimate, Ranks, sharding
from llamafactory_preflight.memory.estimators.zero3_swapped import SwappedGradients
from llamafactory_preflight.memory.zero.swapped import Swapping, swapped_files
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel.zero import ZeroPlan
from llamafactory_preflight.run import RunDescription
from test_multi_gpu import SOFTWARE, deepspeed


RECORDED = json.loads((Path(__file__).parent / "recorded_nvme.json").read_text())
FAILED = {name for name, run in RECORDED["runs"].items() if "error" in run["ranks"][0]}
RAN = sorted(set(RECORDED["runs"]) - FAILED)
TWO = Ranks(world=2, local=2)
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
WITH_A_WORD_LIST = RECORDED["model"] | {
    "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip
PARAMETERS = 8_190_735_360


def described(name: str) -> tuple[RunDescription, ModelShape]:
    recorded = RECORDED["runs"][name]
    run = RunDescription(
        model_name_or_path="m", bf16=True, finetuning_type="lora" if recorded["lora"] else "full", cutoff_len=8,
        per_device_train_batch_size=1, gradient_accumulation_steps=2,
        deepspeed=recorded["deepspeed"] | {"bf16": {"enabled": True}},
    )  # fmt: skip
    return run, ModelShape.from_config(RECORDED["model"] | {"torch_dtype": "bfloat16"})


def swapping(name: str) -> Swapping:
    run, shape = described(name)
    assert run.deepspeed is not None
    everything, plan = sharding.in_order(run, shape), ZeroPlan.from_config(run.deepspeed, hidden_size=1024)
    return Swapping(everything=everything, groups=sharding.groups(everything), plan=plan, world=2, item=2)


@pytest.mark.parametrize("name", RAN)
def test_the_files_are_those_that_deepspeed_writes(name: str) -> None:
    expected = {kind: size for kind, size in swapping(name).disk(tied=0).items() if size}
    assert [rank["disk"] for rank in RECORDED["runs"][name]["ranks"]] == [expected, expected]


@pytest.mark.parametrize(
    ("method", "offloads", "param", "optimizer"),
    [
        ("lora", ["offload_param"], 330_039_296, 0),
        ("full", ["offload_optimizer"], 0, 1_084_489_728 + 357_302_272),
        ("full", ["offload_optimizer", "offload_param"], 330_039_296, 1_084_489_728 + 357_302_272),
    ],
)
def test_the_files_are_those_of_llamafactorys_own_trainings(
    method: str, offloads: list[str], param: int, optimizer: int
) -> None:
    """Three steps of 0.9.5 on the CPU; zero.Init makes a tied head too, whose file is never read and stays."""
    tiles = 10**9 if method == "lora" else 10**7
    sections = {key: {"device": "nvme", "nvme_path": "/nvme"} for key in offloads}
    config = deepspeed(3, sub_group_size=tiles, **sections)
    run = RunDescription(finetuning_type=method, lora_rank=8, bf16=True, deepspeed=config)
    found = swapped_files(run, ModelShape.from_config(WITH_A_WORD_LIST), world=1)
    assert found == {"offload_param": param, "offload_optimizer": optimizer}


@pytest.mark.parametrize("name", RAN)
def test_parameters_are_gathered_as_far_as_they_were_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = follow(monkeypatch)
    run, shape = described(name)
    memory.estimate(run, shape, software=SOFTWARE, ranks=TWO)
    assert as_recorded(forwards) == RECORDED["runs"][name]["available"]


@pytest.mark.parametrize("name", RAN)
def test_the_buffers_are_as_large_as_deepspeeds(name: str) -> None:
    found, plan = swapping(name), swapping(name).plan
    expected = {"optimizer": found.optimizer_buffer * plan.swap.optimizer_buffers * bool(found.swapped_tiles())}
    if plan.offload_param == "nvme":
        flat = sum(max(1, numel) for numel in found.flats()) * found.item
        expected |= {"param": found.param_buffers, "written_back": found.written_back, "flat": flat}
    assert [rank["buffers"] for rank in RECORDED["runs"][name]["ranks"]] == [expected, expected]


@pytest.mark.parametrize("name", [name for name in RAN if name != "param"])
def test_adams_states_leave_main_memory_as_deepspeed_has_it(name: str) -> None:
    found, states = swapping(name), RECORDED["runs"][name]["ranks"][0]["states"]
    in_memory = sum(2 * 4 * found.numel(tile) for tile in found.tiles() if tile not in found.swapped_tiles())
    swapped = sum(2 * 4 * found.numel(tile) for tile in found.swapped_tiles())
    after_first = in_memory + (swapped if found.plan.swap.pipelines else 0)
    assert states == [0, 0, after_first, after_first, in_memory]


@pytest.mark.parametrize("name", [name for name in RAN if name != "param"])
def test_gradients_that_are_not_written_wait_for_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    end = SwappedGradients.end_backward

    def ending(self: SwappedGradients) -> None:
        self._reduce()
        if self.boundary:
            waiting.append(sum(size for size, _ in self.wide))
        end(self)

    monkeypatch.setattr(SwappedGradients, "end_backward", ending)
    run, shape = described(name)
    memory.estimate(run, shape, software=SOFTWARE, ranks=TWO)
    assert {*waiting} == {*RECORDED["runs"][name]["ranks"][0]["waiting"]}


@pytest.mark.parametrize(("name", "word"), [("reuse", "Not enough buffers"), ("few", "")])
def test_too_few_buffers_are_told_before_deepspeed_fails(name: str, word: str) -> None:
    assert word in RECORDED["runs"][name]["ranks"][0]["error"]
    run, shape = described(name)
    with pytest.raises(Unmodelled, match=r"DeepSpeed fails with \d buffers"):
        memory.estimate(run, shape, software=SOFTWARE, ranks=TWO)


def offloaded(world: int = 1, **settings: Any) -> MemoryEstimate:
    run = RunDescription(
        model_name_or_path="m", finetuning_type="full", bf16=True, cutoff_len=2048, enable_liger_kernel=True,
        deepspeed=deepspeed(3, stage3_max_reuse_distance=0, **settings),
    )  # fmt: skip
    shape = ModelShape.from_config(QWEN3_8B)
    return memory.estimate(run, shape, software=SOFTWARE, ranks=Ranks(world=world, local=world))


CPU = {"device": "cpu"}
PIPELINE = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
NVME = {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 7e8}


def test_on_the_gpu_as_little_is_gathered_ahead_as_was_read() -> None:
    main = offloaded(offload_optimizer=CPU, offload_param=CPU)
    optimizer = offloaded(offload_optimizer=NVME, offload_param=CPU)
    both = offloaded(offload_optimizer=NVME, offload_param=NVME)
    assert both.peak_allocated_bytes < optimizer.peak_allocated_bytes
    assert optimizer.peak_allocated_bytes == pytest.approx(main.peak_allocated_bytes, rel=0.05)


def test_what_no_gpu_measured_has_wide_bounds_and_says_so() -> None:
    main, both = offloaded(offload_optimizer=CPU), offloaded(offload_optimizer=NVME)
    widths = [found.high_bytes / found.peak_allocated_bytes for found in (main, both)]
    assert widths[0] < 1.02 and widths[1] > 1.08
    said = [reason for reason in both.reasons if "NVMe" in reason]
    assert said == ["Offloading to NVMe was measured in main memory and on disk, not on a GPU: the bounds are wide."]
    assert not any("NVMe" in reason for reason in main.reasons)


def test_main_memory_holds_buffers_in_place_of_states_and_small_tiles_make_small_buffers() -> None:
    main = offloaded(offload_optimizer=CPU, offload_param=CPU)
    large = offloaded(offload_optimizer=NVME, offload_param=NVME)
    small = offloaded(offload_optimizer=NVME, offload_param=NVME, sub_group_size=10**8)
    piped = offloaded(offload_optimizer=NVME | PIPELINE, offload_param=NVME)
    assert small.host_training_bytes < large.host_training_bytes < main.host_training_bytes
    assert piped.host_training_bytes > main.host_training_bytes


def test_what_fits_main_memory_is_not_read_from_the_nvme() -> None:
    everything = {parameter.key for parameter in swapping("kept").everything}
    assert swapping("kept").swapped_parameters() == frozenset()
    assert swapping("both").swapped_parameters() < everything
    assert swapping("both").swapped_parameters() == swapping("param").swapped_parameters()


@pytest.mark.parametrize("world", [1, 2])
def test_files_go_where_each_section_says(world: int, tmp_path: Path) -> None:
    sections = {key: NVME | {"nvme_path": str(tmp_path / key)} for key in ("offload_optimizer", "offload_param")}
    run = RunDescription(finetuning_type="full", bf16=True, deepspeed=deepspeed(3, **sections))
    needs = list(disk.offloaded(run, ModelShape.from_config(QWEN3_8B), Ranks(world=world, local=world)))
    folders = {need.folder.name: need.certain / PARAMETERS for need in needs}
    assert folders == {
        "offload_param": pytest.approx(2, rel=1e-3),  # 16-bit parameters
        "offload_optimizer": pytest.approx(16, rel=1e-3),  # float32 weights, two moments and gradients
    }


def test_stages_without_an_nvme_write_nothing_and_take_main_memory() -> None:
    def of(device: str) -> dict[str, Any]:
        return deepspeed(2, offload_optimizer={"device": device, "nvme_path": "/nvme"})

    shape, runs = ModelShape.from_config(QWEN3_8B), {}
    for device in ("cpu", "nvme"):
        run = RunDescription(model_name_or_path="m", finetuning_type="full", bf16=True, deepspeed=of(device))
        runs[device] = memory.estimate(run, shape, software=SOFTWARE, ranks=TWO)
        assert list(disk.offloaded(run, shape, TWO)) == []
    assert runs["cpu"] == runs["nvme"]


def test_fast_init_needs_buffers_that_hold_a_tile() -> None:
    """LLaMA-Factory's own training ended with "numel of fp16 buffers ... is too small"; with small tiles it ran."""
    fast, kept = NVME | {"fast_init": True}, NVME | {"max_in_cpu": 0}
    with pytest.raises(Unmodelled, match="fast_init"):
        offloaded(offload_optimizer=fast, offload_param=kept, sub_group_size=10**9)
    found = offloaded(offload_optimizer=fast, offload_param=kept, sub_group_size=10**7)
    plain = offloaded(offload_optimizer=NVME, offload_param=kept, sub_group_size=10**7)
    assert found.host_training_bytes <= plain.host_training_bytes
    assert offloaded(offload_optimizer=fast, offload_param=CPU, sub_group_size=10**9).host_bytes > 0
