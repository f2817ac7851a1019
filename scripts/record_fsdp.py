"""Counts what a process under FSDP really allocates.

usage: python scripts/record_fsdp.py [--accept]

With --accept it is written to tests/recorded_fsdp.json, else printed. torch.profiler reports every allocation of two
optimizer steps on the CPU; communication is left out (torch's fake process group), so that one process stands for a
rank. What accelerate and PEFT do to a model is done by their own code. The model and the runs are those of the file.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._runtime_utils import _reset_flat_param_grad_info_if_needed
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

import command_line


FILE = Path(__file__).resolve().parents[1] / "tests" / "recorded_fsdp.json"
HALF = torch.bfloat16
MARKS = {"MICRO2", "MICRO3", "STEP3"}


def network(model: dict[str, Any], *, lora: bool, reentrant: bool) -> Any:
    """A new model as LLaMA-Factory makes it: what is trained is float32."""
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=HALF)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if lora:
        from peft import LoraConfig, get_peft_model

        made.enable_input_require_grads()
        made = get_peft_model(made, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return made.train()


def flat(made: Any, run: dict[str, Any]) -> Any:
    """Version 1 as accelerate sets it up (accelerator.prepare_model)."""
    if run["lora"]:
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(made)
    else:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DecoderLayer})
    inner = made.forward
    made.forward = lambda *args, **kwargs: _under_autocast(inner, *args, **kwargs)
    return FullyShardedDataParallel(
        made,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF),
        sharding_strategy=ShardingStrategy[run["strategy"]],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if run["prefetch"] else None,
        cpu_offload=CPUOffload(offload_params=False),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _under_autocast(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", HALF):
        return forward(*args, **kwargs)


def each(made: Any, run: dict[str, Any]) -> Any:
    """Version 2 as accelerate sets it up (fsdp2_prepare_model)."""
    settings = {
        "reshard_after_forward": run["strategy"] == "FULL_SHARD",
        "mp_policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF, output_dtype=HALF),
        "offload_policy": OffloadPolicy(),
        "mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),)),
    }
    for module in made.modules():
        if isinstance(module, Qwen3DecoderLayer):
            fully_shard(module, **settings)
    fully_shard(made, **settings)
    return made.to(torch.float32)


def record(model: dict[str, Any], run: dict[str, Any]) -> dict[str, int]:
    """The heights of a run's second step, above what lies between steps."""
    ids = torch.arange(8)[None] % model["vocab_size"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        made = (flat if run["version"] == 1 else each)(
            network(model, lora=run["lora"], reentrant=run["version"] == 1), run
        )
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-4, fused=True)
        for number in range(4):
            last = number % 2 == 1
            if run["version"] == 2:
                made.set_requires_gradient_sync(last)
            with record_function(f"MICRO{number}"):
                if last or run["version"] == 2:
                    made(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                else:
                    with made.no_sync():
                        made(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            with record_function(f"STEP{number}"):
                if last:
                    optimizer.step()
            if last:
                optimizer.zero_grad()
                if run["version"] == 1:  # else the next forward begins with it
                    _reset_flat_param_grad_info_if_needed(made._all_handles)
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    watched.export_chrome_trace(str(trace))
    return heights(trace.read_text(errors="replace"))


def heights(trace: str) -> dict[str, int]:
    """Bytes above those between steps, at the height of the second step's micro-steps and of the step itself."""
    events = json.loads(trace)["traceEvents"]
    totals = [(event["ts"], event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] in MARKS}
    resting = max((at, total) for at, total in totals if at < spans["MICRO2"][0])[1]

    def height(*names: str) -> int:
        return max(total for at, total in totals if any(spans[n][0] <= at <= spans[n][1] for n in names)) - resting

    return {"micro_step": height("MICRO2", "MICRO3"), "step": height("STEP3")}


def main() -> None:
    """Records every run of the file."""
    accept = command_line.accepts(__doc__, FILE)
    recorded = json.loads(FILE.read_text())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=recorded["world"])
    torch.manual_seed(0)
    for run in recorded["runs"].values():
        run["heights"] = record(recorded["model"], run)
    command_line.tell_record(FILE, recorded, accept=accept)


if __name__ == "__main__":
    main()
