"""Counts what two processes with DeepSpeed on the CPU really allocate, and writes tests/recorded_deepspeed.json.

usage: for RANK in 0 1; do WORLD_SIZE=2 RANK=$RANK python scripts/record_deepspeed.py & done; wait

The configurations and the model are those of the file; torch.profiler reports every allocation from before the model
is built. Needs deepspeed and some minutes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any


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


def record(model: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Trains two steps of two micro-steps on 8 tokens and returns this rank's heights."""
    import deepspeed
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = config | {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=torch.bfloat16)
        network.gradient_checkpointing_enable({"use_reentrant": True})
        network.train()
        named = list(network.named_parameters())
        groups = [{"params": [p for name, p in named if ("norm" in name) is norm]} for norm in (False, True)]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=settings)
        del network, named, groups
        ids = torch.arange(8)[None] % model["vocab_size"]
        for number in range(4):
            with record_function(f"MICRO{number}"):
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
                engine.backward(loss)
                del loss
            with record_function(f"STEP{number}"):
                engine.step()
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    watched.export_chrome_trace(str(trace))
    return heights(trace)


def main() -> None:
    """One rank; the first one writes what all of them counted."""
    rank = os.environ["RANK"]
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29811"}
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo")
    known = json.loads(FILE.read_text())
    for run in known["runs"].values():
        found: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
        torch.distributed.all_gather_object(found, record(known["model"], run["deepspeed"]))
        run["ranks"] = found
    if rank == "0":
        FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
