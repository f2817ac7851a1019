"""The oracle against measured runs, and the parts whose rules can be stated on their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory.estimate import Card, MemoryEstimate
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate import estimate, shallow
from llamafactory_preflight.simulate.autocast import CudaAutocast
from llamafactory_preflight.simulate.card import CARD, CardMode, cuda_properties
from llamafactory_preflight.simulate.storage import MIB, Peak, StorageTracker, counted_bytes
from llamafactory_preflight.software import Software


GIB = 1024**3
HOPPER = Card(compute_capability=(9, 0), expandable_segments=True)
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
LORA = RunDescription(
    do_train=True, bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, cutoff_len=2048
)


def simulate(config: Mapping[str, Any] = QWEN3_06B, *, card: Card = HOPPER, **changes: Any) -> MemoryEstimate:
    run = RunDescription(**{name: getattr(LORA, name) for name in LORA.__slots__} | changes)
    return estimate(run, config, software=Software.installed(), card=card)


@pytest.mark.parametrize(
    ("changes", "measured_gib"),
    [
        pytest.param({}, 15.6284, id="lora"),
        pytest.param({"enable_liger_kernel": True}, 2.3145, id="lora, liger"),
        pytest.param({"enable_liger_kernel": True, "use_unsloth_gc": True}, 1.9082, id="inputs on the host"),
        pytest.param({"cutoff_len": 1024, "disable_gradient_checkpointing": True}, 15.8994, id="no checkpointing"),
        pytest.param({"cutoff_len": 1024, "bf16": False, "fp16": True}, 8.9390, id="fp16"),
        pytest.param({"cutoff_len": 1024, "flash_attn": "disabled"}, 8.4461, id="eager attention"),
        pytest.param({"cutoff_len": 1024, "quantization_bit": 4}, 7.8300, id="4 bit"),
        pytest.param(
            {"finetuning_type": "full", "per_device_train_batch_size": 1}, 13.2032, id="full, float32 masters"
        ),
        pytest.param(
            {"finetuning_type": "full", "per_device_train_batch_size": 1, "bf16": False, "pure_bf16": True},
            8.1102,
            id="full, bfloat16",
        ),
    ],
)
def test_the_peak_is_the_one_measured_on_an_h200(changes: dict[str, Any], measured_gib: float) -> None:
    result = simulate(card=Card(compute_capability=(9, 0), expandable_segments=False), **changes)
    assert result.peak_allocated_bytes / GIB == pytest.approx(measured_gib, rel=0.001)
    assert result.low_bytes <= measured_gib * GIB <= result.high_bytes
    assert sum(result.components.values()) == result.peak_allocated_bytes


def test_two_shallow_models_say_what_the_whole_model_says() -> None:
    config = QWEN3_06B | {"num_hidden_layers": 6, "vocab_size": 32000}
    changes = {"cutoff_len": 512, "finetuning_type": "full"}
    extrapolated = simulate(config, **changes)
    run = RunDescription(**{name: getattr(LORA, name) for name in LORA.__slots__} | changes)
    from llamafactory_preflight.simulate.trace import trace

    whole = trace(run, shallow.read(config), card=HOPPER, front=6, back=0).peaks()
    fullest = max(peak.num_bytes for name, peak in whole.items() if name.startswith("forward_backward"))
    assert extrapolated.phases["forward_backward"] == fullest


def test_liger_is_taken_off_again() -> None:
    before = simulate(cutoff_len=256).peak_allocated_bytes
    assert simulate(cutoff_len=256, enable_liger_kernel=True).peak_allocated_bytes < before
    assert simulate(cutoff_len=256).peak_allocated_bytes == before


def test_liger_does_not_spare_the_logits_of_an_evaluation() -> None:
    phases = simulate(
        enable_liger_kernel=True, val_size=0.1, eval_strategy="steps", per_device_eval_batch_size=4
    ).phases
    assert phases["evaluate"] > phases["forward_backward"] + 6 * 4 * 2048 * QWEN3_06B["vocab_size"]


@pytest.mark.parametrize("changes", [{"stage": "ppo"}, {"deepspeed": {"zero_optimization": {"stage": 2}}}])
def test_a_loop_that_is_not_followed_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Unmodelled, match="does not follow"):
        simulate(**changes)


def test_missing_packages_are_named() -> None:
    with pytest.raises(Unmodelled, match="peft"):
        estimate(LORA, QWEN3_06B, software=Software(torch="2", transformers="5", accelerate="1", llamafactory="0.9"))


def test_the_tracker_frees_what_python_frees() -> None:
    tracker = StorageTracker()
    with CardMode(), tracker:
        tracker.stretch("a/a")
        first = torch.empty(1024, device=CARD)
        second = first + 1
        view = second.view(2, 512)
        tracker.stretch("b/b")
        del first, second
        torch.empty(256, device=CARD)
        assert tracker.live_bytes() == 4096
        del view
    peaks = tracker.peaks()
    assert peaks["a/a"].num_bytes == 2 * 4096
    assert peaks["b/b"].num_bytes == 2 * 4096
    assert tracker.live_bytes() == 0


def test_the_allocator_keeps_a_rest_that_is_too_small_to_cut_off() -> None:
    def count(num_bytes: int) -> int:
        return counted_bytes(num_bytes, expandable_segments=False)

    assert count(1) == 512
    assert count(9 * MIB) == 9 * MIB
    assert count(11 * MIB) == 12 * MIB
    assert count(11 * MIB - 512) == 11 * MIB - 512
    assert counted_bytes(11 * MIB, expandable_segments=True) == 11 * MIB


def test_gradients_of_one_tensor_are_summed_in_place() -> None:
    from llamafactory_preflight.simulate import kernels

    tracker = StorageTracker(replacements=kernels.replacements())
    with CardMode(), tracker:
        weight = torch.nn.Parameter(torch.empty(1024, 1024, device=CARD))
        loss = (weight * 2).sum() + (weight * 3).sum()
        tracker.stretch("backward/backward")
        torch.autograd.backward(loss)
    # The weight, two gradients of it, and the scalars of the two sums; a third matrix would be the sum.
    assert tracker.peaks()["backward/backward"].num_bytes < 3.5 * weight.nbytes


def test_autocast_keeps_one_copy_of_a_trained_weight_until_it_is_left() -> None:
    autocast = CudaAutocast()
    with cuda_properties((9, 0)), CardMode(), autocast:
        weight = torch.nn.Parameter(torch.empty(8, 8, device=CARD))
        frozen = torch.empty(8, 8, device=CARD)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.nn.functional.linear(frozen, weight).dtype == torch.bfloat16
            assert autocast.cast(weight, torch.bfloat16) is autocast.cast(weight, torch.bfloat16)
            assert autocast.cast(frozen, torch.bfloat16) is not autocast.cast(frozen, torch.bfloat16)
            assert torch.softmax(frozen.bfloat16(), -1).dtype == torch.float32
        assert torch.nn.functional.linear(frozen, weight).dtype == torch.float32


@pytest.mark.parametrize(
    ("layers", "pattern", "small", "large"),
    [(28, None, 2, 3), (26, 6, 8, 14), (36, 6, 6, 12), (3, None, 3, 3)],
)
def test_depths_differ_by_one_period_and_fit_the_real_depth(
    layers: int, pattern: int | None, small: int, large: int
) -> None:
    config = dict(QWEN3_06B) | {"num_hidden_layers": layers}
    if pattern:
        kinds = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]
        config |= {"layer_types": kinds}
    depths = shallow.choose(shallow.read(config), LORA)
    assert (depths.small, depths.large, depths.real) == (small, large, layers)


@pytest.mark.parametrize(("trained", "front", "back"), [(4, 1, 5), (-4, 5, 1)])
def test_every_layer_that_freeze_tuning_trains_is_watched(trained: int, front: int, back: int) -> None:
    run = RunDescription(finetuning_type="freeze", freeze_trainable_layers=trained)
    depths = shallow.choose(shallow.read(QWEN3_06B), run)
    assert (depths.small, depths.front, depths.back) == (6, front, back)


def test_components_are_extrapolated_one_by_one() -> None:
    depths = shallow.Depths(small=2, large=3, front=1, back=1, real=10)
    small = {"load/load": Peak(num_bytes=30, components={"weights": 20, "buffers": 10})}
    large = {"load/load": Peak(num_bytes=35, components={"weights": 25, "buffers": 10})}
    peak = shallow.extrapolate(small, large, depths)["load/load"]
    assert peak == Peak(num_bytes=70, components={"weights": 60, "buffers": 10})
