"""The memory model: PyTorch on paper, sizes counted by hand, and a named refusal of every path without a formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import preflight, report, verdict
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import Card, estimate, inference_estimate
from llamafactory_preflight.memory.layers.checkpointing import non_reentrant, reentrant
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import COMPONENTS, Leaf, Ledger, Storage, Tensor, run_backward
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.refusals import OTHER_CODE
from llamafactory_preflight.memory.result import PHASES
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


MIB = 2**20
SOFTWARE = Software(torch="2.11.0", transformers="5.6.0", peft="0.18.1")
SOFTWARE_4 = replace(SOFTWARE, transformers="4.57.1")
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NUMEL = 596_049_920
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": QWEN3 | {"model_type": "qwen3_vl_text"},
    "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 1024,
                      "deepstack_visual_indexes": [5, 11, 17]},
}  # fmt: skip
MOE: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
}  # fmt: skip
RUN = RunDescription(
    model_name_or_path="model", do_train=True, cutoff_len=1024, per_device_train_batch_size=1,
    gradient_accumulation_steps=2, bf16=True, optim="adamw_torch_fused",
)  # fmt: skip


def shape(config: dict[str, Any] = QWEN3, **changes: Any) -> ModelShape:
    return ModelShape.from_config(config | changes)


def peak(run: RunDescription, model: ModelShape | None = None) -> int:
    return estimate(run, model or shape(), software=SOFTWARE, card=Card()).peak_allocated_bytes


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(expandable_segments=True)


@pytest.fixture
def ops(ledger: Ledger) -> Ops:
    return Ops(ledger, autocast_dtype=BFLOAT16)


def leaf(ops: Ops, numel: int, dtype: int = BFLOAT16) -> Tensor:
    x = ops.empty(numel, dtype)
    x.node = Leaf(keeps=x.storage)
    return x


def weight(ops: Ops, rows: int, width: int, dtype: int, *, trained: bool) -> Weight:
    storage = Storage(ops.ledger, 0, "weights")
    return Weight(rows * width, dtype, storage, width=width, leaf=Leaf() if trained else None)


def test_a_storage_counts_from_its_making_to_its_last_reference(ledger: Ledger) -> None:
    first = Storage(ledger, 1000, "buffers")
    second = first
    assert ledger.live == 1024  # rounded up to 512
    del first
    assert ledger.live == 1024
    del second
    assert ledger.live == 0
    assert ledger.take_peak()[0] == 1024
    assert ledger.take_peak()[0] == 0


@pytest.mark.parametrize(("size", "counted"), [(12.5, 12.5), (11.875, 12), (9.875, 9.875), (11, 12), (10.5, 10.5)])
def test_without_expandable_segments_a_large_block_keeps_a_small_rest(size: float, counted: float) -> None:
    assert Ledger(expandable_segments=False).block(int(size * MIB)) == int(counted * MIB)
    assert Ledger(expandable_segments=True).block(int(size * MIB)) == int(size * MIB)


def test_the_peak_is_split_by_component(ledger: Ledger) -> None:
    kept = Storage(ledger, 512, "weights")
    passing = Storage(ledger, 1024, "logits")
    del passing
    mark, split = ledger.take_peak()
    assert (mark, split["weights"], split["logits"]) == (1536, 512, 1024)
    assert split.keys() == set(COMPONENTS)
    del kept


def test_two_gradients_of_one_tensor_are_summed_in_place(ops: Ops, ledger: Ledger) -> None:
    x = leaf(ops, MIB, FLOAT32)
    total = ops.add(ops.scale(x), ops.scale(x))
    ledger.take_peak()
    assert total.node is not None
    run_backward(total.node, Storage(ledger, 0, "activations"))
    assert ledger.take_peak()[0] == (4 + 4 + 4 + 4) * MIB  # x, its sum, and a gradient of either branch


def test_a_gradient_that_is_a_view_is_summed_out_of_place(ops: Ops, ledger: Ledger) -> None:
    matrix = weight(ops, 1024, 1024, BFLOAT16, trained=True)
    x = ops.linear(ops.linear(leaf(ops, 1024), matrix), matrix)
    ledger.take_peak()
    assert x.node is not None
    run_backward(x.node, Storage(ledger, 0, "activations"))
    assert 6 * MIB <= ledger.take_peak()[0] < 6.1 * MIB  # both gradients of the matrix and their sum, 2 MiB each


def test_a_leaf_keeps_its_first_gradient(ops: Ops, ledger: Ledger) -> None:
    x = leaf(ops, 512, FLOAT32)
    node = x.node
    out = ops.scale(x)
    assert out.node is not None and isinstance(node, Leaf)
    run_backward(out.node, Storage(ledger, 0, "activations"))
    assert node.grad is not None and node.grad.size == 2048


def test_a_linear_layer_saves_its_input_only_for_a_trained_weight(ops: Ops, ledger: Ledger) -> None:
    for trained, alive in ((True, 2 * MIB + 2 * MIB), (False, 2 * MIB)):
        x = ops.empty(MIB, BFLOAT16)
        x.node = Leaf()
        out = ops.linear(x, weight(ops, 1024, 1024, BFLOAT16, trained=trained))
        del x
        assert ledger.live == alive
        del out
        assert ledger.live == 0


def test_autocast_keeps_the_copy_of_a_trained_float32_weight_until_it_ends(ops: Ops, ledger: Ledger) -> None:
    matrix = weight(ops, 1024, 1024, FLOAT32, trained=True)
    x = ops.empty(1024, BFLOAT16)
    with ops.autocast(), ops.no_grad():
        ops.linear(x, matrix)
        assert ledger.parts["buffers"] == 2 * MIB
        ops.linear(x, matrix)
        assert ledger.parts["buffers"] == 2 * MIB
    assert ledger.parts["buffers"] == 0


@pytest.mark.parametrize("checkpoint", [reentrant, non_reentrant])
def test_a_checkpointed_layer_keeps_its_input_alone(checkpoint: Any, ops: Ops, ledger: Ledger) -> None:
    def layer(ops: Ops, x: Tensor) -> Tensor:
        return ops.unary(ops.unary(ops.unary(x)))

    x = leaf(ops, MIB)
    out = checkpoint(ops, layer, x)
    assert ledger.live == (2 + 2) * MIB
    ledger.take_peak()
    run_backward(out.node, Storage(ledger, 0, "activations"))
    assert ledger.take_peak()[0] >= (2 + 2 + 2 * 2) * MIB  # what the recomputed functions saved, all at once
    del out
    assert isinstance(x.node, Leaf) and x.node.grad is not None


def test_a_checkpointed_input_on_the_host_takes_nothing(ops: Ops, ledger: Ledger) -> None:
    x = ops.unary(leaf(ops, MIB))
    out = reentrant(ops, lambda ops, x: ops.unary(x), x, on_host=True)
    before = ledger.live
    x.storage = Storage(ledger, 0, "activations")
    assert ledger.live == before - 2 * MIB
    assert out.node is not None


def test_components_add_up_to_the_peak_and_every_phase_is_named() -> None:
    found = estimate(RUN, shape(), software=SOFTWARE)
    assert sum(found.components.values()) == found.peak_allocated_bytes == max(found.phases.values())
    assert found.phases.keys() == set(PHASES)
    assert found.low_bytes < found.peak_allocated_bytes < found.high_bytes
    assert found.tokens_per_step == 2 * 1024


def test_the_bounds_of_a_tiny_model_stay_above_zero() -> None:
    tiny = ModelShape.from_config(
        {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "dtype": "bfloat16"}
    )  # fmt: skip
    found = estimate(replace(RUN, cutoff_len=64), tiny, software=SOFTWARE)
    assert found.low_bytes == 0 < found.peak_allocated_bytes < found.high_bytes
    assert verdict.widened(found).low_bytes == 0


def test_what_is_evaluated_has_a_length_of_its_own() -> None:
    run = replace(RUN, val_size=0.1, eval_strategy="steps", cutoff_len=4096)
    cutoff, short, sample = (
        estimate(run, shape(), software=SOFTWARE, length=100, eval_length=length).phases
        for length in (None, 100, 3000)
    )
    assert cutoff["evaluate"] > sample["evaluate"] > 10 * short["evaluate"]
    assert cutoff["forward_backward"] == short["forward_backward"] == sample["forward_backward"]


def test_weights_gradients_and_states_of_full_tuning() -> None:
    run = replace(RUN, finetuning_type="full", bf16=False, pure_bf16=True, cutoff_len=8)
    phases = estimate(run, shape(), software=SOFTWARE, card=Card(compute_capability=(8, 0))).phases
    assert phases["load"] == 2 * QWEN3_NUMEL
    tensors, workspaces = 28 * 11 + 2, 2 * int(8.125 * MIB)
    exact = (2 + 2 + 4) * QWEN3_NUMEL + workspaces
    assert exact <= phases["optimizer_step"] <= exact + 3 * 512 * tensors  # each tensor rounded up to 512 bytes


@pytest.mark.parametrize("phase", ["optimizer_step", "save"])
def test_the_micro_batches_of_a_step_stay_while_weights_are_updated_and_saved(phase: str) -> None:
    # What lives then was listed in a training by LLaMA-Factory: four rows of ids, and the masks of neat packing.
    def found(**settings: Any) -> int:
        run = replace(RUN, finetuning_type="full", **settings)
        return estimate(run, shape(), software=SOFTWARE, card=Card()).phases[phase]

    ids, mask = 4 * 2 * 1024 * 8, 2 * 1024**2 * 2
    four = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    one = four | {"gradient_accumulation_steps": 1}
    assert found(**four) - found(**one) == 3 * ids
    assert found(**four, neat_packing=True) - found(**one, neat_packing=True) == 3 * (ids + mask)
    assert found(**one, neat_packing=True) - found(**one) == mask


def test_adapters_are_counted_in_float32() -> None:
    run = replace(RUN, lora_target=("q_proj",), lora_rank=8)
    numel = 28 * 8 * (1024 + 2048)
    found = estimate(run, shape(), software=SOFTWARE)
    assert found.components["adapters"] == found.components["gradients"] == 4 * numel
    counters = 28 * 2 * 512  # the fused kernel keeps each tensor's step on the card, and nothing is smaller than 512
    assert found.components["optimizer"] == 8 * numel + counters


def test_logits_take_twelve_bytes_each_without_liger_and_next_to_none_with_it() -> None:
    plain, liger = (
        estimate(replace(RUN, enable_liger_kernel=on), shape(), software=SOFTWARE).components for on in (False, True)
    )
    assert plain["logits"] == 12 * 1024 * 151936
    assert liger["logits"] < plain["logits"] / 100


def test_the_longest_sample_counts_where_it_is_known() -> None:
    assert estimate(RUN, shape(), software=SOFTWARE, length=512).peak_allocated_bytes == peak(
        replace(RUN, cutoff_len=512)
    )


def test_oft_is_smaller_than_lora_of_the_same_layers() -> None:
    assert peak(replace(RUN, finetuning_type="oft", enable_liger_kernel=True)) < peak(
        replace(RUN, lora_rank=64, enable_liger_kernel=True)
    )


def test_freezing_all_but_a_module_trains_less() -> None:
    run = replace(RUN, finetuning_type="freeze", freeze_trainable_layers=4)
    everything, attention, mlp = (
        estimate(replace(run, freeze_trainable_modules=(name,)), shape(), software=SOFTWARE).components["gradients"]
        for name in ("all", "self_attn", "mlp")
    )
    norms = 4 * 4 * 2 * 1024
    assert everything == attention + mlp + norms


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
    ],
)
def test_a_quantized_checkpoint_is_counted_by_its_bits(config: dict[str, Any], bits: int) -> None:
    model = shape(quantization_config=config)
    found = estimate(RUN, model, software=SOFTWARE)
    linears = 28 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    rest = 2 * (QWEN3_NUMEL - linears)
    assert linears * bits // 8 < found.components["weights"] - rest < linears * (bits + 1) // 8
    wide = (found.high_bytes - found.low_bytes) / found.peak_allocated_bytes
    assert (wide > 0.15) == (config["quant_method"] != "bitsandbytes")


def test_a_checkpoint_in_eight_bit_floats_is_trained_on_in_sixteen() -> None:
    assert peak(RUN, shape(quantization_config={"quant_method": "fp8"})) == peak(RUN)


def test_a_vision_tower_adds_its_frozen_weights_and_a_blank_image() -> None:
    text = replace(RUN, template="qwen3_nothink")
    vision = estimate(text, shape(VISION), software=SOFTWARE)
    assert vision.components["weights"] > estimate(text, shape(), software=SOFTWARE).components["weights"]
    assert peak(replace(RUN, template="qwen3_vl"), shape(VISION)) > vision.peak_allocated_bytes
    assert any("images" in reason for reason in vision.reasons)


def test_a_model_without_liger_kernels_says_so() -> None:
    found = estimate(replace(RUN, enable_liger_kernel=True), shape(VISION), software=SOFTWARE)
    assert found.components["logits"] == 12 * 1024 * 151936
    assert any("liger" in reason for reason in found.reasons)


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto"])
def test_evaluation_takes_no_gradients_and_grows_with_its_batch(stage: str) -> None:
    run = replace(RUN, stage=stage, eval_strategy="steps", eval_dataset=("rows",), per_device_eval_batch_size=1)
    one = estimate(run, shape(), software=SOFTWARE).phases
    two = estimate(replace(run, per_device_eval_batch_size=2), shape(), software=SOFTWARE).phases
    assert one["load"] < one["evaluate"] < one["forward_backward"]
    assert two["evaluate"] > one["evaluate"]
    assert estimate(replace(RUN, stage=stage), shape(), software=SOFTWARE).phases["evaluate"] == 0


def test_evaluation_by_generating_holds_a_cache_in_place_of_logits() -> None:
    run = replace(RUN, do_eval=True, val_size=0.1, per_device_eval_batch_size=4)
    loss = estimate(run, shape(), software=SOFTWARE).phases["evaluate"]
    generating = estimate(replace(run, predict_with_generate=True), shape(), software=SOFTWARE).phases["evaluate"]
    cache = 2 * 28 * 8 * 128 * 2 * 4 * (1024 + run.max_new_tokens)
    assert 2 * QWEN3_NUMEL + cache < generating < loss


def test_main_memory_holds_what_is_saved_and_what_checkpointing_moves_there() -> None:
    lora = estimate(RUN, shape(), software=SOFTWARE).host_bytes
    full = estimate(replace(RUN, finetuning_type="full"), shape(), software=SOFTWARE).host_bytes
    moved = estimate(replace(RUN, use_unsloth_gc=True, cutoff_len=65536), shape(), software=SOFTWARE).host_bytes
    assert full - lora > 4 * QWEN3_NUMEL * 0.9
    assert moved - lora > 28 * 65536 * 1024 * 2 * 0.9


def test_a_chat_holds_weights_cache_and_one_prompt() -> None:
    found = inference_estimate(RUN, shape(), software=SOFTWARE)
    cache = 2 * 28 * 8 * 128 * 2 * (1024 + RUN.max_new_tokens)
    assert found.components["weights"] == 2 * QWEN3_NUMEL
    assert found.components["buffers"] > cache
    assert sum(found.components.values()) == found.peak_allocated_bytes < peak(RUN)


def test_an_export_takes_the_card_only_where_it_is_told_to() -> None:
    run = replace(RUN, export_dir="out", adapter_name_or_path=("adapter",))
    on_cpu = inference_estimate(run, shape(), software=SOFTWARE)
    on_card = inference_estimate(replace(run, export_device="auto"), shape(), software=SOFTWARE)
    assert on_cpu.peak_allocated_bytes == 0 < 2 * QWEN3_NUMEL < on_card.peak_allocated_bytes
    assert on_cpu.host_bytes > 2 * QWEN3_NUMEL


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({name: True}, QWEN3) for name in OTHER_CODE},
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, QWEN3),
    "ppo": ({"stage": "ppo"}, QWEN3),
    "label smoothing": ({"label_smoothing_factor": 0.1}, VISION),
    "pref_ftx": ({"stage": "dpo", "pref_ftx": 0.1}, QWEN3),
    "another reference": ({"stage": "dpo", "ref_model": "other"}, QWEN3),
    "full tuning of quantized weights": ({"finetuning_type": "full", "quantization_bit": 4}, QWEN3),
    "a width": ({"quantization_bit": 3}, QWEN3),
    "a quantization": ({}, QWEN3 | {"quantization_config": {"quant_method": "aqlm", "bits": 2}}),
    "the vision tower": ({"freeze_vision_tower": False}, VISION),
    "the projector": ({"freeze_multi_modal_projector": False}, VISION),
    "the vision tower alone": ({"freeze_language_model": True}, VISION),
    "packed vision": ({"neat_packing": True}, VISION),
    "rotated experts": ({"finetuning_type": "oft"}, MOE),
    "rotation that does not divide": ({"finetuning_type": "oft", "oft_block_size": 60}, QWEN3),
    "a target": ({"lora_target": ("lm_head",)}, QWEN3),
    "every norm": ({"additional_target": ("norm",)}, QWEN3),
    "badam by ratio": ({"finetuning_type": "full", "use_badam": True, "badam_mode": "ratio"}, QWEN3),
    "adam-mini": ({"finetuning_type": "full", "use_adam_mini": True}, QWEN3),
    "layer-wise galore": ({"finetuning_type": "full", "use_galore": True, "galore_layerwise": True}, QWEN3),
    "layer-wise apollo": ({"finetuning_type": "full", "use_apollo": True, "apollo_layerwise": True}, QWEN3),
    "an optimizer": ({"optim": "schedule_free_adamw"}, QWEN3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_path_without_formula_is_named(name: str) -> None:
    changes, config = REFUSED[name]
    with pytest.raises(Unmodelled):
        estimate(replace(RUN, **changes), shape(config), software=SOFTWARE)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"finetuning_type": "freeze"}, MOE),
        ({"finetuning_type": "freeze", "freeze_trainable_modules": ("self_attn", "up_proj")}, MOE),
        ({"use_dora": True}, MOE),
        ({}, VISION | {"model_type": "qwen3_vl_moe", "text_config": MOE}),
    ],
)
def test_what_transformers_4_does_with_experts_is_refused_where_it_has_no_formula(
    changes: dict[str, Any], config: dict[str, Any]
) -> None:
    with pytest.raises(Unmodelled):
        estimate(replace(RUN, **changes), shape(config), software=SOFTWARE_4)


def test_the_layout_of_experts_is_unknown_without_transformers() -> None:
    with pytest.raises(Unmodelled, match="Which transformers"):
        estimate(RUN, shape(MOE), software=replace(SOFTWARE, transformers=None))


def test_another_engine_is_refused() -> None:
    with pytest.raises(Unmodelled):
        inference_estimate(replace(RUN, infer_backend="vllm"), shape(), software=SOFTWARE)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next", "deepseek_v3", "gemma3n", "t5", ""])
def test_another_architecture_is_refused(model_type: str) -> None:
    with pytest.raises(Unmodelled):
        shape(model_type=model_type)


def test_the_command_tells_a_chat_from_a_training_by_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    base = {"model_name_or_path": str(tmp_path), "template": "qwen3"}
    chat = preflight.check(base, gpu="80GiB")
    export = preflight.check(base | {"export_dir": "merged", "export_device": "auto"}, gpu="80GiB")
    training = preflight.check(base | {"do_train": True, "dataset": "rows"}, gpu="80GiB")
    assert [result.serves for result in (chat, export, training)] == [True, True, False]
    assert "chat or API" in report.text(chat) and "export on auto" in report.text(export)
    assert chat.estimate is not None and chat.estimate.phases["optimizer_step"] == 0
    simulated = preflight.check(base, gpu="80GiB", exact=True)
    assert simulated.verdict.word == "unknown" and "--exact simulates trainings" in simulated.verdict.reasons[0]
