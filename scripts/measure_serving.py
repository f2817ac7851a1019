"""Measures what chat and export of a model take on a CUDA card, without model weights.

usage: python scripts/measure_serving.py CASES.json OUT.jsonl [--jobs N]

CASES.json is that of measure_runs.py; a case has a "task" too: `chat` answers one prompt of `cutoff_len` tokens with
`max_new_tokens` tokens through LLaMA-Factory's ChatModel, `export` writes the model through its export_model. With
"adapter": true an adapter is trained for a step beforehand. Every case is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import command_line
import measure_runs


GIB = 2**30
TASKS = ("chat", "export")
TRAINS_ONLY = ("bf16", "fp16", "max_steps", "learning_rate", "per_device_train_batch_size")


def adapter_of(case: dict[str, Any]) -> Path:
    """Trains the case's adapter for one step in a process of its own, and returns its folder."""
    folder = measure_runs.ROOT / "adapters" / case["id"]
    lora = {key: value for key, value in case["args"].items() if key.startswith(("lora_", "use_dora"))}
    args = measure_runs.arguments({"id": case["id"], "model": case["model"], "args": lora | {"cutoff_len": 64}})
    args |= {"output_dir": str(folder), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    program = "import json, sys; from llamafactory.train.tuner import run_exp; run_exp(json.loads(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, json.dumps(args)], check=True)
    return folder


def serve(case: dict[str, Any]) -> dict[str, Any]:
    """Runs one case in this process and returns what it took."""
    args = {"model_name_or_path": str(measure_runs.ROOT / "models" / case["model"]), "template": "qwen3_nothink"}
    args |= {key: value for key, value in case["args"].items() if key not in TRAINS_ONLY}
    if case.get("adapter"):
        args["adapter_name_or_path"] = str(adapter_of(case))
    import torch

    started = time.time()
    if case["task"] == "chat":
        from llamafactory.chat import ChatModel

        model = ChatModel(args | {"infer_backend": "huggingface"})
        loaded = torch.cuda.memory_allocated()
        load_peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        turn = [{"role": "user", "content": "story"}, {"role": "assistant", "content": ""}]
        around = len(model.engine.template.encode_oneturn(model.engine.tokenizer, turn)[0]) - 1
        words = "story " * (args["cutoff_len"] - around)
        answer = model.chat([{"role": "user", "content": words}])[0]
        assert answer.prompt_length == args["cutoff_len"], answer.prompt_length
        extra = {"prompt_tokens": answer.prompt_length, "answer_tokens": answer.response_length}
    else:
        from llamafactory.train.tuner import export_model

        folder = measure_runs.ROOT / "exports" / case["id"]
        export_model(args | {"export_dir": str(folder)})
        loaded = load_peak = 0
        extra = {}
    return extra | {
        "id": case["id"],
        "loaded_allocated_gib": round(loaded / GIB, 4),
        "load_peak_allocated_gib": round(load_peak / GIB, 4),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 4),
        "host_peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "wall_seconds": round(time.time() - started, 1),
    }


def main() -> None:
    """Writes the models and runs every case, or with `--case` one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=command_line.count, default=4)
    parser.add_argument("--case", help="run this one in this process and add its row")
    options = parser.parse_args()
    plan = command_line.read_cases(options.cases)
    command_line.rows_to_add_to(options.out, "id")
    untold = [case["id"] for case in plan["cases"] if case.get("task") not in TASKS]
    if untold:
        command_line.fail(f"{options.cases}: the case {untold[0]} has no task, which is {' or '.join(TASKS)}")
    os.environ.update(measure_runs.ENVIRONMENT)
    if options.case:
        chosen = [case for case in plan["cases"] if case["id"] == options.case]
        if not chosen:
            command_line.fail(f"{options.cases} has no case {options.case}")
        case = chosen[0]
        row = json.dumps(serve(case))
        with open(options.out, "a") as file:
            file.write(row + "\n")
        return
    measure_runs.claim()
    for name, config in plan["models"].items():
        measure_runs.write_model(name, config)
    waiting, running = list(plan["cases"]), []
    while waiting or running:
        running = [process for process in running if process.poll() is None]
        if waiting and len(running) < options.jobs:
            case = waiting.pop(0)
            log = open(measure_runs.ROOT / f"{case['id']}.log", "w")
            command = [sys.executable, __file__, str(options.cases), str(options.out), "--case", case["id"]]
            environment = os.environ | {"MASTER_PORT": str(29700 + len(waiting))} | case.get("env", {})
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        time.sleep(0.2)
    if not options.out.exists():
        command_line.fail(f"no case got through; their logs are in {measure_runs.ROOT}")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
