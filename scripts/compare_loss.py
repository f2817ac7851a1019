"""Does a faster preset learn as much? The loss after the same samples, against LLaMA-Factory's own example.

usage: python scripts/compare_loss.py [--pretrain-steps 300] [--cpu] [--seed 42]

A small Qwen3 is trained on one text, the language reference that comes with Python, and then tuned on another:
questions about functions of the standard library, answered by their docstrings. Every way of tuning gets the same
samples once, the same seed, and eight samples a step on average. What counts is the loss of held-out answers.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml

import compare_speed


MODULES = (
    "argparse ast asyncio base64 bisect calendar collections configparser contextlib copy csv dataclasses "
    "datetime decimal difflib dis email.utils enum fileinput fnmatch fractions functools gettext glob gzip "
    "heapq hmac html http imaplib inspect io ipaddress itertools json linecache locale logging math mimetypes "
    "operator os os.path pathlib pickle pkgutil platform plistlib poplib pprint queue random re sched secrets "
    "selectors shelve shlex shutil smtplib socket sqlite3 ssl statistics string struct subprocess tarfile "
    "tempfile textwrap threading time tokenize traceback types typing unittest urllib.parse urllib.request "
    "uuid warnings wave weakref webbrowser xml.dom zipfile"
).split()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LONGEST_ANSWER = 700
HELD_OUT = 150
SAMPLES_PER_STEP = 8


def questions() -> list[tuple[str, str]]:
    """Questions and answers in a fixed order: what a function does, and its docstring."""
    found: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute, value in sorted(vars(module).items()):
            if attribute.startswith("_") or not callable(value):
                continue
            with warnings.catch_warnings(action="ignore"):  # some names are on their way out
                text = inspect.getdoc(value)
            if text and 40 <= len(text) <= LONGEST_ANSWER:
                found.setdefault(text, f"What does {name}.{attribute} do?")
    pairs = [(question, answer) for answer, question in found.items()]
    random.Random(0).shuffle(pairs)
    return pairs


def reference() -> str:
    """The text that the model is trained on first."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics.values())


def build(folder: Path, *, steps: int, device: str) -> float:
    """Trains a small Qwen3 with a tokenizer of its own on the reference, and returns the last loss."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    text = reference()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device)
    tokens = torch.tensor(bpe.encode(text).ids, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    loss = torch.zeros(())
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - 257, (16,)).tolist()
        batch = torch.stack([tokens[start : start + 256] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    return float(loss.detach())


def held_out_loss(model_folder: Path, tuned: Path | None, pairs: list[tuple[str, str]], device: str) -> float:
    """Mean loss of an answer's token, over all held-out answers."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    is_adapter = tuned is not None and (tuned / "adapter_config.json").exists()
    whole = model_folder if tuned is None or is_adapter else tuned
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).to(device)
    if is_adapter:
        model = PeftModel.from_pretrained(model, str(tuned))
    total, count = 0.0, 0
    for question, answer in pairs:
        asked = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        answered = tokenizer(f"{answer}<|im_end|>")["input_ids"]
        tokens = torch.tensor([asked + answered], device=device)
        labels = torch.tensor([[-100] * len(asked) + answered], device=device)
        with torch.no_grad():
            total += float(model(input_ids=tokens, labels=labels).loss) * len(answered)
        count += len(answered)
    return total / count


def arms(root: Path, mean_tokens: float, *, cpu: bool) -> dict[str, dict[str, Any]]:
    """What is compared. The presets' packs hold as many samples as a step of the example."""
    length = round(SAMPLES_PER_STEP * mean_tokens / 8) * 8  # LLaMA-Factory 0.9.5 packs to multiples of 8 only
    packed = {"cutoff_len": length, "per_device_train_batch_size": 1}
    packed |= {"gradient_accumulation_steps": 1}
    preset = yaml.safe_load((root / "presets/24gb_lora.yaml").read_text(encoding="utf-8")) | packed
    found = {"example": compare_speed.EXAMPLE, "recipe": compare_speed.RECIPE, "preset": preset}
    full = {"finetuning_type": "full", "learning_rate": 1e-5}
    found["example, full"] = compare_speed.EXAMPLE | full
    if cpu:
        half = {"fp16": False, "bf16": True, "enable_liger_kernel": False, "use_cpu": True}
        return {name: {**given, **half} for name, given in found.items()}
    found["preset, full"] = yaml.safe_load((root / "presets/24gb_full.yaml").read_text(encoding="utf-8")) | packed
    return found


def tune(given: dict[str, Any], folder: Path) -> int:
    """Trains through LLaMA-Factory's own command; returns the number of optimizer steps."""
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(given), encoding="utf-8")
    code = "from llamafactory.cli import main; main()"
    environment = os.environ | {"LLAMAFACTORY_PREFLIGHT": "off", "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, "train", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: LLaMA-Factory failed on {config}:\n{done.stderr[-2000:]}")
    return int(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def main() -> int:
    """Builds the model, tunes it in every way, and prints the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=1200, help="at most as many to tune on")
    parser.add_argument("--arm", action="append", help="only these")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cpu", action="store_true", help="without a GPU, and so without Liger and bitsandbytes")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    names = arms(root, 1.0, cpu=options.cpu).keys()
    if unknown := sorted(set(options.arm or ()) - names):
        parser.error(f"there is no arm {unknown[0]!r}, but {', '.join(names)}")
    if options.pretrain_steps < 1 or options.samples < 1:
        parser.error("--pretrain-steps and --samples take 1 or more")
    import torch

    if not options.cpu and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA GPU here that torch can use; --cpu does without")
    device = "cpu" if options.cpu else "cuda"
    folder = Path(tempfile.mkdtemp(prefix="compare_loss."))
    last = build(folder / "model", steps=options.pretrain_steps, device=device)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    pairs = questions()
    held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT : HELD_OUT + options.samples]
    lengths = [len(tokenizer(question + answer)["input_ids"]) + 9 for question, answer in trained]
    mean = statistics.mean(lengths)
    print(f"trained on the reference to a loss of {last:.2f}; {len(trained)} samples, mean {mean:.0f} tokens")
    rows = [{"instruction": question, "input": "", "output": answer} for question, answer in trained]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    shared = {
        "model_name_or_path": str(folder / "model"), "dataset": "rows", "dataset_dir": str(folder),
        "seed": options.seed, "template": "qwen3_nothink", "num_train_epochs": 1, "save_strategy": "no",
        "report_to": "none", "overwrite_cache": True, "preprocessing_num_workers": 1, "plot_loss": False,
        "logging_steps": 5,
    }  # fmt: skip
    untuned = held_out_loss(folder / "model", None, held_out, device)
    print(f"{'':16}{'steps':>7}{'held-out loss':>15}\n{'not tuned':16}{0:7}{untuned:15.4f}", flush=True)
    losses = {}
    for name, given in arms(root, mean, cpu=options.cpu).items():
        if options.arm and name not in options.arm:
            continue
        out = folder / name.replace(", ", "_")
        given.pop("enable_thinking", None)
        steps = tune(given | shared | {"output_dir": str(out)}, out)
        losses[name] = held_out_loss(folder / "model", out, held_out, device)
        print(f"{name:16}{steps:7}{losses[name]:15.4f}", flush=True)
    return int(losses.get("preset", 0.0) > losses.get("example", 1e9))


if __name__ == "__main__":
    sys.exit(main())
