"""Lets real LLaMA-Factory runs run out of GPU memory in every phase, and shows what the user is told.

usage: python scripts/provoke_oom.py OUT.jsonl [--only ID ...]

Each case is a small Qwen3 with weights of zeros under a cap for torch's allocator, in a process of its own. Where a
remedy is proposed, the run is repeated with it under the same cap. A row says what was told, in which phase, and
whether the remedy ran; the exit code is 1 if a phase was wrong or a remedy failed. Needs a CUDA card.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

import command_line
import measure_runs


SCRIPTS = Path(__file__).resolve().parent
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
}  # fmt: skip
FULL = {"finetuning_type": "full", "lora_target": None}
EVALUATION = {
    "with_eval_dataset": True, "do_eval": True, "eval_strategy": "steps", "eval_steps": 1,
    "per_device_eval_batch_size": 32,
}  # fmt: skip
# What is asserted: the phase's words, and whether a remedy must be proposed and run.
CASES: list[dict[str, Any]] = [
    {"id": "load", "cap_gib": 0.3, "args": {}, "says": "while the model was loaded"},
    {
        "id": "forward", "cap_gib": 6, "args": {"per_device_train_batch_size": 8},
        "says": "in the forward or backward pass of step 1", "remedy": True,
    },
    {
        "id": "late", "cap_gib": 4, "args": {"cutoff_len": 8192, "gradient_accumulation_steps": 1, "max_steps": 8},
        "lengths": [128] * 5 + [8000] + [128] * 10, "says": "in the forward or backward pass of step 6",
        "remedy": True,
    },
    {
        "id": "optimizer", "cap_gib": 2.6, "args": FULL | {"cutoff_len": 64, "gradient_accumulation_steps": 1},
        "says": "in the optimizer step of step 1", "remedy": True,
    },
    {
        "id": "evaluate", "cap_gib": 3, "args": EVALUATION | {"cutoff_len": 256},
        "says": "in the evaluation after step 1", "remedy": True,
    },
    {
        "id": "save", "cap_gib": 5, "args": FULL | {"cutoff_len": 64, "save_strategy": "steps", "save_steps": 2},
        "in_save_gib": 3, "says": "while saving after step 2", "remedy": True,
    },
    {
        "id": "neighbour", "leave_gib": 3, "args": {"per_device_train_batch_size": 8},
        "says": "in the forward or backward pass of step 1", "remedy": True,
    },
    {
        "id": "fits", "cap_gib": 6, "args": {"cutoff_len": 512}, "finishes": True,
        "env": {"LLAMAFACTORY_PREFLIGHT_SNAPSHOT": "2"},
    },
]  # fmt: skip


def prepare(case: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's arguments of a case."""
    args = measure_runs.arguments({"id": case["id"], "model": "provoke", "args": case["args"]})
    args = {name: value for name, value in args.items() if value is not None}
    if "lengths" in case:
        folder = Path(args["dataset_dir"]).parent / "late"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"instruction": f"story {i}", "input": "", "output": "story " * n} for i, n in enumerate(case["lengths"])
        ]
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
        args |= {"dataset_dir": str(folder), "disable_shuffling": True}
    return args


def run_here(case: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Runs one case in this process."""
    import torch
    from llamafactory.train import tuner
    from transformers import TrainerCallback

    class Greedy(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            if case.get("in_save_gib"):
                torch.empty(int(case["in_save_gib"] * measure_runs.GIB), dtype=torch.uint8, device="cuda")

    began = time.time()
    if case.get("cap_gib"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap_gib"] * measure_runs.GIB / total)
    row: dict[str, Any] = {"id": case["id"]}
    try:
        tuner.run_exp(args, callbacks=[Greedy()])
        row |= {"finished": True}
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        row |= {"finished": False, "type": type(error).__name__, "message": str(error)[:400], "told": "".join(notes)}
    record = Path(args["output_dir"]) / "preflight.json"
    if record.is_file():
        written = json.loads(record.read_text())
        row["measurement"], row["prediction"] = written["measurement"], written["prediction"]
        row["watch_seconds"] = written["ranks"][0]["watch_seconds"]
    snapshot = Path(args["output_dir"]) / "preflight_snapshot/rank_0"
    if case.get("env"):
        tables = [file.read_text() for file in snapshot.glob("*.txt")]
        row |= {"told": "".join(tables), "pictures": [str(file) for file in snapshot.glob("*.png")]}
    return row | {"seconds": round(time.time() - began, 1)}


def child(case: dict[str, Any], args: dict[str, Any], log: Path) -> dict[str, Any]:
    """Runs one case in a process of its own."""
    env = os.environ | {"LLAMAFACTORY_PREFLIGHT": "warn", "LLAMAFACTORY_TEMPLATE": "off"} | case.get("env", {})
    with open(log, "w") as stream:
        done = subprocess.run(
            [sys.executable, __file__, "--child"], input=json.dumps([case, args]), env=env, stderr=stream, text=True,
            stdout=subprocess.PIPE, timeout=240,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return json.loads(lines[-1][4:]) if lines else {"id": case["id"], "died": done.returncode, "log": str(log)}


@contextlib.contextmanager
def neighbour(leave_gib: float) -> Any:
    """Another process that takes the card but for `leave_gib`."""
    code = (
        "import sys, torch; free = torch.cuda.mem_get_info()[0]\n"
        f"held = torch.empty(free - int({leave_gib} * 2**30), dtype=torch.uint8, device='cuda')\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        process.wait()


def provoke(case: dict[str, Any]) -> dict[str, Any]:
    """Runs a case, and again with the first remedy that it was told."""
    with neighbour(case["leave_gib"]) if "leave_gib" in case else contextlib.nullcontext():
        args = prepare(case)
        logs = [measure_runs.ROOT / f"provoke_{case['id']}{again}.log" for again in ("", "_remedy")]
        row = child(case, args | {"output_dir": args["output_dir"] + "_a"}, logs[0])
        told = row.get("told", "")
        if case.get("finishes"):
            return row | {"right": bool(row.get("finished") and row.get("pictures"))}
        row["right"] = case["says"] in " ".join(told.split())
        remedy = re.search(r"It fits with .*?\n    (\S+=\S.*)\n", told)
        if remedy is None:
            return row | {"right": row["right"] and not case.get("remedy")}
        changes = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in remedy[1].split())}
        again = child(case, args | changes | {"output_dir": args["output_dir"] + "_b"}, logs[1])
    row["remedy"] = {"set": remedy[1], "finished": again.get("finished"), "message": again.get("message")}
    return row | {"right": row["right"] and bool(again.get("finished"))}


def main() -> int:
    """Runs the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=[], choices=[case["id"] for case in CASES])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update({name: value for name, value in measure_runs.ENVIRONMENT.items() if "PREFLIGHT" not in name})
    with contextlib.suppress(ImportError):
        sys.path.append(str(SCRIPTS.parent / "plugin"))  # where the package is not installed
        from llamafactory_preflight import _startup

        _startup.install()
    if options.child:
        case, args = json.loads(sys.stdin.read())
        print("ROW " + json.dumps(run_here(case, args)), flush=True)
        return 0
    import torch

    if options.out is None:
        command_line.fail("name a file for the rows")
    if not torch.cuda.is_available():
        command_line.fail("there is no CUDA card here")
    command_line.rows_to_add_to(options.out, "id")
    measure_runs.claim()
    measure_runs.write_model("provoke", MODEL)
    wrong = 0
    for case in CASES:
        if options.only and case["id"] not in options.only:
            continue
        row = provoke(case)
        wrong += not row["right"]
        with open(options.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"--- {case['id']}: {'right' if row['right'] else 'WRONG'}, {row.get('seconds')} s", flush=True)
        print(row.get("told") or json.dumps(row), *([row["remedy"]] if "remedy" in row else []), sep="\n", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
