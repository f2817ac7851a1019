"""Counts what two processes with DeepSpeed on the CPU really allocate.

usage: for RANK in 0 1; do WORLD_SIZE=2 RANK=$RANK python scripts/record_deepspeed.py [--accept] & done; wait

With --accept it is written to tests/recorded_deepspeed.json, else printed. The configurations and the model are those
of the file. Of `runs` torch.profiler reports every allocation from before the model is built; of `gathering`, under
ZeRO-3, what is noted is how many elements DeepSpeed counts as gathered after each module that it meets: in all-gathers
on the CPU Gloo makes copies that NCCL does not. Where weights are 4 bit, `held` are the packed elements that
bitsandbytes keeps at the same points. Needs deepspeed, PEFT, LLaMA-Factory and some minutes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command_line


FILE = Path(__file__).resolve().parents[1] / "tests" / "recorded_deepspeed.json"
EVENT = r'"name": "\[memory\]".*?"ts": ([\d.]+).*?"Total Allocated": (\d+)'
MARK = r'"name": "((?:MICRO|STEP)\d)".{0,80}?"ts": ([\d.]+), "dur": ([\d.]+)'


def heights(trace: Path) -> dict[str, int]:
    """Bytes above those between steps, at the height of the second step's micro-steps and of the step itself."""
    text = trace.read_text(errors="replace")
    totals = sorted((float(at), int(total)) for at, total in re.findall(EVENT, text, re.DOTALL))
    spans = {name: (float(at), float(at) + float(width)) for name, at, width in re.findall(MARK, text, re.DOTALL)}
    resting = [total for at, total in totals if at < spans["MICRO2"][0]][-1]

    def height(*names: str) -> int:
        inside = [spans[name] for name in names]
        return max(total for at, total in totals if any(start <= at <= end for start, end in inside)) - resting

    return {"micro_step": height("MICRO2", "MICRO3"), "step": height("STEP3")}


def quantize(network: Any) -> Any:
    """The same model in 4 bit with LLaMA-Factory's checkpointing, loaded as LLaMA-Factory does under ZeRO-3."""
    import torch
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        network = AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind, dtype=torch.bfloat16)
    prepare_model_for_training(network, ModelArguments(model_name_or_path="m"))
    return network


def prepare(model: dict[str, Any], config: dict[str, Any], *, lora: bool, quantized: bool = False) -> Any:
    """A DeepSpeed engine around a new model with gradient checkpointing, for micro-steps of one sequence."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = config | {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=torch.bfloat16)
    if quantized:
        network = quantize(network)
    else:
        network.gradient_checkpointing_enable({"use_reentrant": True})
    if lora:
        from peft import LoraConfig, get_peft_model

        if not quantized:
            network.enable_input_require_grads()
        adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        network = get_peft_model(network, adapters, autocast_adapter_dtype=False)
    network.train()
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in named if ("norm" in name) is norm]} for norm in (False, True)]
    groups = [group for group in groups if group["params"]]
    if "offload_optimizer" in config["zero_optimization"]:  # what accelerate puts in its place
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(groups, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    return deepspeed.initialize(model=network, optimizer=optimizer, config=settings)[0]


def train(engine: Any, vocab_size: int) -> Iterator[int]:
    """Two steps of two micro-steps on 8 tokens; yields before each micro-step and before what follows it."""
    import torch
    from torch.profiler import record_function

    ids = torch.arange(8)[None] % vocab_size
    for number in range(4):
        yield number
        with record_function(f"MICRO{number}"):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            del loss
        with record_function(f"STEP{number}"):
            engine.step()


def record(model: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """This rank's heights."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for _ in train(prepare(model, config, lora=False), model["vocab_size"]):
            pass
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    watched.export_chrome_trace(str(trace))
    return heights(trace)


def watch_views() -> Callable[[], int]:
    """Makes a function that counts the packed elements of which bitsandbytes' functions keep views."""
    from bitsandbytes.autograd._functions import MatMul4Bit

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    forward = MatMul4Bit.forward

    def noting(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(ctx, *args, **kwargs)
        alive.add(ctx)
        return out

    def held() -> int:
        views = [ctx.tensors[1] for ctx in alive if ctx.tensors[1] is not None]
        return sum({view.untyped_storage().data_ptr(): view.numel() for view in views}.values())

    MatMul4Bit.forward = staticmethod(noting)
    return held


def follow(model: dict[str, Any], config: dict[str, Any], *, lora: bool, quantized: bool) -> dict[str, list[str]]:
    """Elements that count as gathered, and as kept, after each module, a line for each micro-step."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    steps: list[list[int]] = []
    kept: list[list[int]] = []
    held = watch_views() if quantized else None
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        fetch(self, *args, **kwargs)
        steps[-1].append(self._PartitionedParameterCoordinator__n_available_params)
        kept[-1].append(held() if held is not None else 0)

    engine = prepare(model, config, lora=lora, quantized=quantized)
    PartitionedParameterCoordinator.fetch_sub_module = noting
    try:
        for _ in train(engine, model["vocab_size"]):
            steps.append([])
            kept.append([])
    finally:
        PartitionedParameterCoordinator.fetch_sub_module = fetch
    found = {"available": steps, "held": kept} if quantized else {"available": steps}
    return {name: [" ".join(map(str, step)) for step in lines] for name, lines in found.items()}


def main() -> None:
    """One rank; the first one tells what all of them counted."""
    accept = command_line.accepts(__doc__, FILE)
    rank, world = command_line.rank()
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29811",
    }
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    known = json.loads(FILE.read_text())
    for run in known["runs"].values():
        found: list[Any] = [None] * world
        torch.distributed.all_gather_object(found, record(known["model"], run["deepspeed"]))
        run["ranks"] = found
    for run in known["gathering"].values():
        quantized = run.get("quantized", False)
        run |= follow(known["model"], run["deepspeed"], lora=run["lora"], quantized=quantized)
    if rank == 0:
        command_line.tell_record(FILE, known, accept=accept)


if __name__ == "__main__":
    main()
