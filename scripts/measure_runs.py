"""Measures the true peak memory of real LLaMA-Factory runs on a CUDA card, without model weights.

usage: python scripts/measure_runs.py CASES.json OUT.jsonl [--jobs N] [--deadline SECONDS] [--one-gpu]

CASES.json is {"models": {name: config.json as a mapping}, "cases": [...]}, and a case {"id": ..., "model": name,
"args": {LLaMA-Factory arguments}, "cap_gib": allocator memory, "env": {...}, "need_gib": what to reserve meanwhile,
"host_gib": the same of main memory, "ranks": processes that train together, "accelerate": the configuration of
accelerate that launches them, "save": whether the model is saved}.
Weights are sparse files of zeros in the real shapes: memory does not depend on values, but for the router's, which are
random and spread tokens over the experts. Every sample is cut to exactly `cutoff_len` tokens. Each case is a process
of its own, forked from one that has imported what takes long, several side by side within the card's memory. Ranks are
fresh processes (measure_ranks.py), one a GPU or all on one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command_line
import measure_images
import measure_ranks


ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a card must not start CUDA before the fork
    "DISABLE_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "LLAMAFACTORY_VERBOSITY": "WARN",
    "LLAMAFACTORY_PREFLIGHT": "off",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "WANDB_DISABLED": "true",
}
GIB = 2**30
ROOT_VARIABLE = "MEASURE_ROOT"
ROOT = Path(os.environ.get(ROOT_VARIABLE, Path(tempfile.gettempdir()) / "measure"))
"""Where models, data and what runs save are written, and what runs save is deleted."""
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "\n", "system", "user", "assistant", "story"]
STORY = [f"word{index}" for index in range(500)]
ROUTING = ("embed_tokens.weight", "post_attention_layernorm.weight", "mlp.gate.weight")
"""What decides which experts a token is sent to; zeros would send every token to the same ones."""
DEFAULTS: dict[str, Any] = {
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_target": "all", "template": "qwen3_nothink",
    "cutoff_len": 2048, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4,
    "bf16": True, "learning_rate": 1e-4, "dataloader_num_workers": 0, "preprocessing_num_workers": 1,
    "overwrite_cache": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "plot_loss": False,
    "disable_tqdm": True,
}  # fmt: skip


def claim() -> None:
    """Makes `ROOT`, or ends with one message where it holds what these scripts did not make."""
    command_line.claim(ROOT, ROOT_VARIABLE)


def write_model(name: str, config: dict[str, Any]) -> Path:
    """Writes a checkpoint of zeros with the tensors that transformers itself expects for a config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder = ROOT / "models" / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        kind = AutoModelForImageTextToText if measure_images.sees(config) else AutoModelForCausalLM
        model = kind.from_config(AutoConfig.from_pretrained(folder))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.get("tie_word_embeddings") else set()
    for key, tensor in model.state_dict().items():
        if key in tied:
            continue
        size = tensor.numel() * 2
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(blob)))
        file.write(blob)
        file.truncate(8 + len(blob) + offset)
        if "num_experts" in config:
            for key in filter(lambda key: key.endswith(ROUTING), header):
                file.seek(8 + len(blob) + header[key]["data_offsets"][0])
                file.write(_random_rows(header[key]["shape"], seed=header[key]["data_offsets"][0]))
    tokenizer = _write_tokenizer(folder)
    if measure_images.sees(config):
        measure_images.write_processor(folder, config, tokenizer)
    return folder


def _random_rows(shape: list[int], *, seed: int) -> bytes:
    """Bfloat16 numbers for a vector, or for as many rows of a matrix as the tokenizer has words."""
    import torch

    size = [min(shape[0], len(WORDS + STORY)), *shape[1:]] if len(shape) > 1 else shape
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.view(torch.uint8).numpy().tobytes()


def _write_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbered = {word: index for index, word in enumerate(WORDS + STORY)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast


def write_data(stage: str, cutoff: int, images: Sequence[Sequence[int]] = ()) -> tuple[Path, str]:
    """A dataset whose every sample is longer than the cutoff, in the format of a stage, with images of these sizes."""
    folder = ROOT / "data" / "_".join([stage, str(cutoff), *(f"{width}x{height}" for width, height in images)])
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join(random.Random(cutoff).choices(STORY, k=cutoff + 64))
    rows: list[dict[str, Any]]
    info: dict[str, Any] = {"file_name": "rows.json"}
    if stage == "pt":
        rows = [{"text": text} for _ in range(96)]
        info["columns"] = {"prompt": "text"}
    elif stage in ("dpo", "rm"):
        rows = [{"instruction": f"story {i}", "input": "", "chosen": text, "rejected": text} for i in range(64)]
        info |= {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}
    elif stage == "kto":
        rows = [{"instruction": f"story {i}", "output": text, "label": bool(i % 2)} for i in range(64)]
        info["columns"] = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
    else:
        rows = [{"instruction": f"story {i}", "input": "", "output": text} for i in range(64)]
    if images:
        files = measure_images.write_images(folder, images)
        info["columns"] = {"prompt": "instruction", "query": "input", "response": "output", "images": "images"}
        rows = [row | {"input": "<image>" * len(files), "images": files} for row in rows]
    if not (folder / "dataset_info.json").exists():
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "dataset_info.json").write_text(json.dumps({"rows": info}))
    return folder, "rows"


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments LLaMA-Factory gets."""
    args = DEFAULTS | case["args"]
    folder, dataset = write_data(args["stage"], args["cutoff_len"], case.get("images", ()))
    args |= {
        "model_name_or_path": str(ROOT / "models" / case["model"]),
        "dataset_dir": str(folder),
        "output_dir": str(ROOT / "out" / case["id"]),
    }
    if args.pop("with_eval_dataset", False):
        args["eval_dataset"] = dataset
    return args | {"dataset": dataset}


def peaks() -> Callable[[], float]:
    """Makes a function that returns the highest peak in GiB since its last call, whoever reset torch's mark meanwhile.

    DeepSpeed does while it prepares. Without a GPU the peak is 0.
    """
    import torch

    marks: list[int] = []
    reset = torch.cuda.reset_peak_memory_stats

    def reset_noting_peak(*args: Any) -> None:
        marks.append(torch.cuda.max_memory_allocated())
        reset(*args)

    def peak() -> float:
        if not torch.cuda.is_available():
            return 0.0
        torch.cuda.synchronize()
        value = max([*marks, torch.cuda.max_memory_allocated()]) / GIB
        reset()
        marks.clear()
        return round(value, 4)

    torch.cuda.reset_peak_memory_stats = reset_noting_peak
    return peak


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Runs one case in this process and returns what it took."""
    import torch
    from llamafactory.train import tuner
    from llamafactory.train.rm import workflow as reward
    from transformers import Trainer, TrainerCallback

    kept = ("id", "model", "args", "images", "cap_gib", "env", "ranks", "accelerate")
    result: dict[str, Any] = {key: case[key] for key in kept if key in case}
    peak = peaks()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            result["loaded_allocated_gib"] = round(torch.cuda.memory_allocated() / GIB, 4)
            result["start_seconds"] = round(time.time() - started, 1)
            result["load_peak_allocated_gib"] = peak()
            result["trainable_params"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
            torch.cuda.empty_cache()
            self.last = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result.setdefault("step_peak_allocated_gib", []).append(peak())
            result.setdefault("step_reserved_gib", []).append(round(torch.cuda.max_memory_reserved() / GIB, 4))
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                result["card_used_gib"] = round((total - free) / GIB, 4)
                result["card_reserved_gib"] = round(torch.cuda.memory_reserved() / GIB, 4)
            now = time.time()
            result.setdefault("step_seconds", []).append(round(now - self.last, 4))
            self.last = now

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["evaluate_peak_allocated_gib"] = peak()
            self.last = time.time()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["save_peak_allocated_gib"] = peak()
            self.last = time.time()

    started = time.time()
    try:
        if torch.cuda.is_available():
            torch.cuda.init()
        if case.get("cap_gib"):
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(case["cap_gib"] * GIB / total)
        if case.get("snapshot"):
            torch.cuda.memory._record_memory_history(max_entries=400000)
        args = arguments(case)
        if args["save_strategy"] == "no" and not case.get("save"):
            Trainer.save_model = lambda *_, **__: None  # the final model would only fill the disk
            reward.fix_valuehead_checkpoint = lambda *_, **__: None  # and looks for it there
        tuner.run_exp(args, callbacks=[Watch()])
        result["ok"] = True
        if case.get("save"):
            result["save_peak_allocated_gib"] = peak()
    except torch.cuda.OutOfMemoryError as error:
        result |= {"ok": False, "out_of_memory": str(error)[:300]}
    except BaseException as error:  # one case's failure is a row, whatever it was
        result |= {"ok": False, "error": "".join(traceback.format_exception(error))[-1500:]}
    if case.get("snapshot"):
        torch.cuda.memory._dump_snapshot(case["snapshot"])
    steps = result.get("step_peak_allocated_gib", [])
    result["peak_allocated_gib"] = max(steps) if result["ok"] else round(torch.cuda.max_memory_allocated() / GIB, 4)
    result["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 4)
    if torch.cuda.is_available():
        result["pinned_gib"] = round(_pinned_bytes() / GIB, 3)
    result["host_peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
    result["wall_seconds"] = round(time.time() - started, 1)
    return result


def _pinned_bytes() -> int:
    """Page-locked memory that torch's allocator has taken, or -1 where this torch does not count it."""
    import torch

    try:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"])
    except (AttributeError, KeyError):
        return -1


def run_forked(case: dict[str, Any], out: Path, *, one_gpu: bool) -> int:
    """Forks a process for one case; it appends its row to `out`."""
    port = measure_ranks.free_port()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(ROOT / f"{case['id']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update({"MASTER_PORT": str(port), "OMP_NUM_THREADS": "2"} | case.get("env", {}))
        row = measure_ranks.run(case, port, one_gpu=one_gpu) if "ranks" in case else run_case(case)
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")
        status = 0
    finally:
        os._exit(status)


def run_all(cases: list[dict[str, Any]], out: Path, options: argparse.Namespace) -> None:
    """Runs cases side by side, never more at once than the card and main memory hold."""
    limits = {"need_gib": options.card_gib, "host_gib": options.host_gib}
    started = time.time()
    running: dict[int, dict[str, Any]] = {}
    todo = sorted(cases, key=lambda case: -float(case.get("need_gib", 16)))
    while todo or running:
        late = time.time() - started > options.deadline
        fitting = [case for case in todo if not running or _fits([*running.values(), case], limits)]
        if fitting and len(running) < options.jobs and not late:
            todo.remove(fitting[0])
            pid = run_forked(fitting[0], out, one_gpu=options.one_gpu)
            running[pid] = fitting[0]
            continue
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            case = running.pop(pid)
            shutil.rmtree(ROOT / "out" / case["id"], ignore_errors=True)
            print(f"{time.time() - started:6.0f} s  {case['id']}", flush=True)
        elif late:
            break
        else:
            time.sleep(0.1)
    print(f"left: {[case['id'] for case in todo]}, still running: {[case['id'] for case in running.values()]}")


def _fits(cases: list[dict[str, Any]], limits: dict[str, float]) -> bool:
    defaults = {"need_gib": 16, "host_gib": 4}
    return all(sum(case.get(name, defaults[name]) for case in cases) <= limit for name, limit in limits.items())


def _import_all_but_llamafactory() -> None:
    """Imports what takes long, once for all cases.

    LLaMA-Factory itself is imported in each case: it starts CUDA, which no fork survives, and mends TRL first.
    """
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.trainer_seq2seq  # noqa: F401

    assert not torch.cuda.is_initialized()


def main() -> None:
    """Reads the cases, writes the models and runs everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=command_line.count, default=12)
    parser.add_argument("--deadline", type=float, default=480)
    parser.add_argument("--card-gib", type=float, default=132)
    parser.add_argument("--host-gib", type=float, default=100)
    parser.add_argument("--one-gpu", action="store_true", help="put all ranks of a case on the first GPU")
    options = parser.parse_args()
    plan = command_line.read_cases(options.cases)
    command_line.rows_to_add_to(options.out, "id", "ok")
    claim()
    os.environ.update(ENVIRONMENT)
    _import_all_but_llamafactory()
    if any("ranks" in case for case in plan["cases"]):
        measure_ranks.build_cpu_adam()
    used = {case["model"] for case in plan["cases"]}
    for name, config in plan["models"].items():
        if name in used:
            write_model(name, config)
    run_all(plan["cases"], options.out, options)
    for line in options.out.read_text().splitlines() if options.out.exists() else ():
        row = json.loads(line)
        fault = (row.get("out_of_memory") or row.get("error") or "").strip().splitlines()
        print(row["id"], row["ok"], row.get("peak_allocated_gib"), row["wall_seconds"], *fault[-1:], flush=True)


if __name__ == "__main__":
    sys.exit(main())
