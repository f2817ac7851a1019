"""Counts what training steps of small mixture-of-experts models allocate, on the CPU and with transformers 4.

usage: python scripts/count_experts.py [--accept]      (where transformers 4 is installed)

With --accept the table is written to tests/measured/expert_list.json. The real model with LLaMA-Factory's own adapters
runs forward and backward, and every storage is followed from its birth to its end. Nothing is trained; the router's
choices are replaced by ones that send equally many tokens to each expert (`even`), or all of them to the same few
(`uneven`). tests/test_expert_list.py holds the formula against the table.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import command_line


TABLE = Path(__file__).resolve().parent.parent / "tests" / "measured" / "expert_list.json"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "norm_topk_prob": True, "max_position_embeddings": 4096,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "model", "output_dir": "out", "dataset": "rows", "template": "qwen3_nothink",
    "do_train": True, "stage": "sft", "finetuning_type": "lora", "lora_target": "all", "cutoff_len": 256,
    "bf16": True, "optim": "sgd", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    "flash_attn": "disabled",
}  # fmt: skip
WIDE = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters everywhere": ({}, {}),
    "adapters on attention": ({}, {"lora_target": "q_proj,k_proj,v_proj,o_proj"}),
    "adapters on experts": ({"num_experts": 32}, {"lora_target": "gate_proj,up_proj,down_proj", "lora_rank": 32}),
    "adapters with dropout": ({}, {"lora_dropout": 0.1, "per_device_train_batch_size": 2}),
    "adapters in bf16 without autocast": ({}, {"pure_bf16": True, "bf16": False}),
    "adapters, many experts": (WIDE, {"cutoff_len": 1024}),
    "adapters, large vocabulary": ({"vocab_size": 30000}, {}),
    "adapters, not reentrant": ({}, {"use_reentrant_gc": False}),
    "adapters, no checkpointing": ({}, {"disable_gradient_checkpointing": True}),
    "attention, no checkpointing": ({}, {"disable_gradient_checkpointing": True, "lora_target": "q_proj,v_proj"}),
    "full": ({}, {"finetuning_type": "full"}),
    "full, accumulated": ({}, {"finetuning_type": "full", "gradient_accumulation_steps": 2}),
    "full in bf16": ({}, {"finetuning_type": "full", "pure_bf16": True, "bf16": False}),
    "frozen but for MLPs": (
        {}, {"finetuning_type": "freeze", "freeze_trainable_layers": 2, "freeze_trainable_modules": "mlp"},
    ),
    "liger": ({"vocab_size": 4096}, {"enable_liger_kernel": True}),
    "liger, no checkpointing": ({}, {"enable_liger_kernel": True, "disable_gradient_checkpointing": True}),
    "liger, full in bf16": (
        {}, {"enable_liger_kernel": True, "finetuning_type": "full", "pure_bf16": True, "bf16": False},
    ),
}  # fmt: skip
UNEVEN = ("adapters everywhere", "adapters on attention", "adapters, no checkpointing")


def count(config: dict[str, Any], arguments: dict[str, Any], *, even: bool = True) -> int:
    """Returns the most bytes alive in a forward and backward pass, each storage rounded up to 512 bytes.

    Args:
        config: Changes to `CONFIG`.
        arguments: Changes to `ARGUMENTS`.
        even: Whether all experts get equally many tokens, or the first few get them all.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from llamafactory_preflight.run import from_arguments
    from llamafactory_preflight.simulate import liger, shallow
    from llamafactory_preflight.simulate.loop import sequence_length
    from llamafactory_preflight.simulate.model import prepare
    from llamafactory_preflight.simulate.storage import StorageTracker
    from llamafactory_preflight.software import Software

    run = from_arguments(ARGUMENTS | arguments, software=Software.installed(), origin="here")
    settings = shallow.read(CONFIG | config)
    settings.use_cache = False

    def topk(scores: torch.Tensor, number: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, experts = scores.shape
        chosen = torch.arange(rows * number) % experts if even else torch.arange(number).repeat(rows)
        return scores.gather(-1, chosen.view(rows, number)), chosen.view(rows, number)

    tracker = StorageTracker(
        device_type="cpu", expandable_segments=True, replacements={torch.ops.aten.topk.default: topk}
    )
    with ExitStack() as stack:
        stack.enter_context(_like_a_card())
        if run.enable_liger_kernel:
            stack.enter_context(liger.applied_without_launches(run, settings))
        build: Any = AutoModelForCausalLM.from_config
        model: Any = build(settings, dtype=torch.bfloat16, attn_implementation="eager")
        model = prepare(model, settings, run)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if run.gradient_accumulation_steps > 1:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        held = [*model.parameters(), *model.buffers(), *(p.grad for p in trained if p.grad is not None)]
        size = (run.per_device_train_batch_size, sequence_length(run))
        stack.enter_context(tracker)
        for tensor in held:
            tensor.detach()
        batches = [_batch(size, settings.vocab_size) for _ in range(run.gradient_accumulation_steps)]
        torch.autograd.backward(_forward(model, wide=run.bf16)(batches[0])["loss"])
    return max(peak.num_bytes for peak in tracker.peaks().values())


def _batch(size: tuple[int, int], vocab_size: int) -> dict[str, Any]:
    import torch

    rows = {name: torch.randint(0, vocab_size, size) for name in ("input_ids", "labels")}
    return rows | {"attention_mask": torch.ones(size, dtype=torch.int64)}


def _forward(model: Any, *, wide: bool) -> Callable[[dict[str, Any]], Any]:
    """The forward under autocast, its outputs turned to float32, as accelerate does it."""
    import torch
    from accelerate.utils.operations import convert_outputs_to_fp32

    def forward(batch: dict[str, Any]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16) if wide else nullcontext():
            return model(**batch)

    return convert_outputs_to_fp32(forward) if wide else forward  # type: ignore[no-any-return]


@contextmanager
def _like_a_card() -> Iterator[None]:
    """Dropout keeps a mask of a byte an element, as CUDA's does."""
    import torch

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, training)[0] if training and p else input

    with mock.patch("torch.nn.functional.dropout", dropout):
        yield


def main() -> None:
    """Counts every case; with --accept writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accept", action="store_true", help=f"write {TABLE.name}")
    accept = parser.parse_args().accept
    from llamafactory_preflight.software import Software

    software = Software.installed()
    if software.at_least("transformers", 5) or software.transformers is None:
        command_line.fail("transformers 4 has lists of experts, and it is not installed here")
    logging.disable(logging.ERROR)
    names = ("llamafactory", "torch", "transformers", "peft", "accelerate", "liger_kernel")
    rows: list[dict[str, Any]] = []
    for even, cases in ((True, CASES), (False, {name: CASES[name] for name in UNEVEN})):
        for name, (config, arguments) in cases.items():
            counted = count(config, arguments, even=even)
            rows.append({"name": name, "even": even, "config": config, "args": arguments, "bytes": counted})
            print(f"{counted:12d}  {'even' if even else 'uneven'}  {name}", flush=True)
    table = {"software": {name: getattr(software, name) for name in names}, "rows": rows}
    if accept:
        command_line.write_whole([(TABLE, json.dumps(table, indent=1) + "\n")])


if __name__ == "__main__":
    main()
