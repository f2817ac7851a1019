"""Compares the speed of presets with what else people run: same model, card, memory and data, one after the other.

usage: python scripts/compare_speed.py [PRESET ...] [--mix short] [--mix chat] [--seconds 8] [--jobs 3] [--json]

Against each preset: `example`, LLaMA-Factory's own example for that method with the model exchanged, and `recipe`, the
one that circulates (batch 2 x 8, fp16, LoRA of rank 4 on attention, cutoff 1024). Where one of them would not fit the
memory of the preset's card, it gets `enable_liger_kernel`, which costs it no speed; a note says so. Two more can be
asked for: `shorter`, the preset with packs of 2,048 tokens and as many more of them, and `kept`, the preset without
gradient checkpointing and with packs that fit then. Two data sets of natural length are generated: `short` like
Alpaca and `chat`. The models have the real shapes and random weights. Every run's first step is left out; runs load
side by side and take turns to train.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import command_line
import measure_runs
import preset_runs
import qwen3_shapes
from llamafactory_preflight import presets
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.presets import Preset
from measure_runs import GIB, ROOT
from preset_runs import CONTEXT_GIB, Run
from verify_presets import REPLACED, predicted


# Mean and largest number of tokens, spread of the logarithm, number of samples.
MIXES = {"short": (150, 1024, 0.8, 4000), "chat": (1000, 2048, 0.6, 1200)}
SEED = 20
SHORTER = 2048
ARMS = ("preset", "example", "recipe", "shorter", "kept")
SHARED: dict[str, Any] = {"stage": "sft", "do_train": True, "finetuning_type": "lora", "template": "qwen3_nothink"}
# LLaMA-Factory's examples/train_lora/qwen3_lora_sft.yaml; the one for QLoRA differs in the quantization alone.
EXAMPLE = SHARED | {
    "lora_rank": 8, "lora_target": "all", "cutoff_len": 2048, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
    "bf16": True,
}  # fmt: skip
RECIPE = SHARED | {
    "lora_rank": 4, "lora_target": "q_proj,k_proj,v_proj,o_proj", "cutoff_len": 1024, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "fp16": True,
}  # fmt: skip
QUANTIZED = {"quantization_bit": 4, "quantization_method": "bnb", "double_quantization": False}
# Dense 16-bit operations a second that the vendor states.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "L40S": 362e12, "4090": 165.2e12, "3090": 71e12}


def write_mix(name: str) -> tuple[Path, list[int]]:
    """A data set with lengths drawn from a lognormal distribution, always the same ones.

    Returns:
        Its folder, and the number of words of each sample; the chat template adds a few tokens.
    """
    mean, longest, spread, count = MIXES[name]
    folder = ROOT / "data" / f"mix_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    lengths: list[int] = []
    while len(lengths) < count:
        length = int(draw.lognormvariate(0, spread) * mean)
        if 12 <= length <= longest - 24:
            lengths.append(length)
    scale = mean / statistics.mean(lengths)
    lengths = [max(12, min(int(length * scale), longest - 24)) for length in lengths]
    rows = []
    for length in lengths:
        asked = max(4, int(length * draw.uniform(0.1, 0.4)))
        rows.append({"instruction": "story " * asked, "input": "", "output": "story " * (length - asked)})
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return folder, lengths


def arms(preset: Preset) -> dict[str, dict[str, Any]]:
    """What is compared, by name, as LLaMA-Factory arguments."""
    method = QUANTIZED if preset.method == "qlora" else {}
    given = dict(preset.arguments)
    times = max(1, given["cutoff_len"] // SHORTER)
    shorter = {"cutoff_len": SHORTER, "per_device_train_batch_size": times * given["per_device_train_batch_size"]}
    return {
        "preset": given,
        "shorter": given | shorter,
        "kept": given | {"disable_gradient_checkpointing": True, "per_device_train_batch_size": 1},
        "example": EXAMPLE | method,
        "recipe": RECIPE | method,
    }


def run_of(preset: Preset, arm: str, mix: str, seconds: float, card: dict[str, Any]) -> Run | None:
    """One arm on one mix, under the memory of the preset's card; None if it cannot be made to fit."""
    name = preset.arguments["model_name_or_path"]
    folder = measure_runs.write_model(name.rpartition("/")[2], qwen3_shapes.config(name))
    given = arms(preset)[arm] | REPLACED
    given |= {"model_name_or_path": str(folder), "dataset": "rows", "dataset_dir": str(ROOT / "data" / f"mix_{mix}")}
    given |= {"output_dir": str(ROOT / "out" / f"{preset.name}.{arm}.{mix}"), "save_strategy": "no", "max_steps": 1000}
    if arm == "kept":
        lengths = (length for length in (4096, 3072, 2048, 1536, 1024) if length <= given["cutoff_len"])
        fitting = (length for length in lengths if _fits(given | {"cutoff_len": length}, preset, card))
        length = next(fitting, None)
        if length is None:
            return None
        given |= {"cutoff_len": length}
    # Nothing is longer than this, so with batches that are not packed no more memory is taken.
    longest = given if given.get("neat_packing") else given | {"cutoff_len": min(given["cutoff_len"], MIXES[mix][1])}
    peak = predicted(longest, preset, card)
    changed = f"packs of {given['cutoff_len']}" if arm == "kept" else ""
    if arm in ("example", "recipe") and not _fits(longest, preset, card):
        changed = "enable_liger_kernel"
        given |= {"enable_liger_kernel": True}
        peak = predicted(longest | {"enable_liger_kernel": True}, preset, card)
    return Run(
        name=f"{preset.name}.{arm}.{mix}",
        arguments=given,
        cap_gib=preset.usable_bytes / GIB,
        need_gib=(peak or preset.usable_bytes) / GIB + CONTEXT_GIB + 0.5,
        seconds=seconds,
        counts=True,
        row={"preset": preset.name, "arm": arm, "mix": mix, "changed": changed, "model": name},
    )


def _fits(given: dict[str, Any], preset: Preset, card: dict[str, Any]) -> bool:
    return (predicted(given, preset, card) or 0) + 0.2 * GIB < preset.usable_bytes


def completed(run: Run, row: dict[str, Any], card: dict[str, Any]) -> dict[str, Any]:
    """A run's outcome with its speed."""
    row |= run.row
    if not row["ok"] or len(row["step_seconds"]) < 2:
        return row
    seconds = sum(row["step_seconds"][1:])
    samples, tokens, padded = (last - first for first, last in zip(row["counted"][0], row["counted"][-1], strict=True))
    row |= {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}
    row["padding"] = 1 - tokens / padded
    weights, attention = qwen3_shapes.parameters(run.row["model"])
    # Forward, and the gradient of what flows back: frozen weights have none of their own. Half of attention is masked.
    flops = 4 * weights + 3 * 4 * attention * tokens / samples / 2
    peak = next((value for name, value in PEAK_FLOPS.items() if name in card["name"]), None)
    return row | {"mfu": flops * tokens / seconds / peak if peak else None}


def table(rows: list[dict[str, Any]]) -> str:
    """All rows with the preset's speed as a multiple of theirs."""
    lines = [
        f"{'preset':18}{'mix':7}{'arm':9}{'samples/s':>10}{'tokens/s':>10}{'padding':>9}{'MFU':>7}{'peak GiB':>10}"
        f"{'preset is':>11}"
    ]
    ours = {(row["preset"], row["mix"]): row for row in rows if row["arm"] == "preset" and "mfu" in row}
    for row in sorted(rows, key=lambda row: (row["mix"], row["preset"], row["arm"] != "preset", row["arm"])):
        head = f"{row['preset']:18}{row['mix']:7}{row['arm']:9}"
        if "mfu" not in row:
            lines.append(head + str(row.get("fault", "no step finished")).strip().splitlines()[-1][:90])
            continue
        own = ours.get((row["preset"], row["mix"]))
        times = f"{own['samples_per_second'] / row['samples_per_second']:.1f}x" if own else "-"
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        lines.append(
            f"{head}{row['samples_per_second']:10.1f}{row['tokens_per_second']:10,.0f}{row['padding']:9.0%}{mfu:>7}"
            f"{row['peak_gib']:10.2f}{times:>11}  {row['changed']}"
        )
    return "\n".join(lines)


def main() -> int:
    """Reads the options, runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="by default every tier's lora and qlora")
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="by default both")
    parser.add_argument("--arm", action="append", choices=ARMS, help="by default preset, example and recipe")
    parser.add_argument("--seconds", type=float, default=8, help="how long to measure each, after its first step")
    parser.add_argument("--jobs", type=command_line.count, default=3, help="how many load at a time")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run, as it ends")
    options = parser.parse_args()
    try:
        chosen = [presets.find(name) for name in options.presets]
    except UserError as error:
        command_line.fail(str(error))
    several = [preset.name for preset in chosen if preset.num_gpus > 1 or not preset.usable_bytes]
    if several:
        command_line.fail(f"{several[0]} is not for one GPU of a known size, and only those are compared")
    chosen = chosen or [preset for preset in presets.available() if preset.name.endswith(("gb_lora", "gb_qlora"))]
    chosen = [preset for preset in chosen if preset.num_gpus == 1]
    card = preset_runs.card()
    preset_runs.prepare()
    mixes = options.mix or list(MIXES)
    for mix in mixes:
        lengths = write_mix(mix)[1]
        said = f"{mix}: {len(lengths)} samples, mean {statistics.mean(lengths):.0f} and at most {max(lengths)} words"
        print(f"{said}, and 9 tokens of the template each", file=sys.stderr)
    made = [
        run_of(preset, arm, mix, options.seconds, card)
        for mix in mixes
        for preset in chosen
        for arm in options.arm or ["preset", "example", "recipe"]
    ]
    runs = [run for run in made if run is not None]
    rows: list[dict[str, Any]] = []

    def done(run: Run, row: dict[str, Any]) -> None:
        rows.append(completed(run, row, card))
        if options.json:
            print(json.dumps(rows[-1]), flush=True)
        print(f"{len(rows)} of {len(runs)}: {run.name}", file=sys.stderr)

    left = preset_runs.run_all(
        runs, jobs=options.jobs, card_gib=card["total"] / GIB - 2, done=done, deadline=options.deadline
    )
    if not options.json:
        print(table(rows))
    if left:
        print(f"no time was left for {', '.join(left)}", file=sys.stderr)
    return 1 if left or not all(row["ok"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
