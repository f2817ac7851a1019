"""Runs every preset on a CUDA card under the memory of its tier's smallest card: does it fit, and as predicted?

usage: python scripts/verify_presets.py [PRESET ...] [--jobs N] [--memory-only] [--one-gpu] [--accumulate N]
       [--resume] [--json]

The models have the real shapes and random weights, so nothing is downloaded; every sample is as long as the preset
allows. A preset trains for four optimizer steps, evaluates if it says so, and saves. Presets load side by side and
take turns to train; only `--jobs 1` leaves the card entirely to one at a time. What got through is not run again
unless the preset changed or `--fresh` is given. Exit code 1: one failed, did not fit, or took other memory than
predicted.
`--resume` instead trains a 0.6B model with every DeepSpeed preset for two steps, and goes on from what that saved.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import command_line
import measure_runs
import preset_runs
import qwen3_shapes
from llamafactory_preflight import preflight, presets
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.presets import Preset
from measure_runs import GIB, ROOT
from preset_runs import CONTEXT_GIB, Run


STEPS = 4
AGREEMENT = 0.02
LEAST_USE = 0.8
SMALL = "Qwen/Qwen3-0.6B"
REPLACED: dict[str, Any] = {
    "max_steps": STEPS, "preprocessing_num_workers": 1, "overwrite_cache": True, "plot_loss": False,
    "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "dataloader_num_workers": 0,
}  # fmt: skip


def run_of(preset: Preset, options: argparse.Namespace, card: dict[str, Any], *, model: str | None = None) -> Run:
    """The preset with a model without weights, samples of full length, and a few steps."""
    given = dict(preset.arguments)
    name = model or given["model_name_or_path"]
    folder = measure_runs.write_model(name.rpartition("/")[2], qwen3_shapes.config(name))
    data, rows = measure_runs.write_data(given["stage"], given["cutoff_len"])
    given |= REPLACED | {
        "model_name_or_path": str(folder),
        "dataset": rows,
        "dataset_dir": str(data),
        "output_dir": str(ROOT / "out" / preset.name),
        # An adapter's checkpoint is small. Of a full model the final weights are enough, which are saved in any case.
        "save_strategy": "no" if preset.method == "full" else "steps",
        "save_steps": STEPS,
    }
    if options.accumulate:
        given["gradient_accumulation_steps"] = min(options.accumulate, given["gradient_accumulation_steps"])
    if "deepspeed" in given:
        given["deepspeed"] = str(preset.file.parent.parent / given["deepspeed"])
    peak = predicted(given, preset, card)
    states = 2 * _num_weights(folder) if "paged" in str(given.get("optim")) else 0
    each = (peak or preset.usable_bytes) / GIB + CONTEXT_GIB + 0.5 + (states / GIB if preset.method == "full" else 0)
    return Run(
        name=preset.name,
        arguments=given,
        num_gpus=preset.num_gpus,
        one_gpu=card["count"] < preset.num_gpus,
        cap_gib=preset.usable_bytes / GIB,
        need_gib=each * (preset.num_gpus if card["count"] < preset.num_gpus else 1),
        timed=not options.memory_only,
        row={"predicted_gib": peak and round(peak / GIB, 4)},
    )


def _num_weights(folder: Path) -> int:
    """Number of weights of a checkpoint in 16 bits."""
    return (folder / "model.safetensors").stat().st_size // 2


def predicted(given: dict[str, Any], preset: Preset, card: dict[str, Any]) -> int | None:
    """Predicted peak of the fullest card in bytes; None where the run is not modelled."""
    estimate = estimated(given, preset, card)
    return None if estimate is None else estimate.peak_allocated_bytes


def estimated(given: dict[str, Any], preset: Preset, card: dict[str, Any]) -> MemoryEstimate | None:
    """What is predicted under the memory of the preset's card; None where the run is not modelled."""
    device = Device(
        name=card["name"],
        total_bytes=card["total"],
        free_bytes=preset.usable_bytes + int(CONTEXT_GIB * GIB),
        compute_capability=(card["capability"][0], card["capability"][1]),
        planned=True,
    )
    return preflight.examine(
        given,
        origin=str(preset.file),
        beside=preset.file.parent,
        devices=(device,) * preset.num_gpus,
        host_budget_bytes=None,
    ).estimate


def completed(run: Run, row: dict[str, Any], card: dict[str, Any]) -> dict[str, Any]:
    """A run's outcome with what it is held against, and the verdict on it."""
    given = run.arguments
    tokens = given["cutoff_len"] * given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    tokens *= run.num_gpus * (2 if given["stage"] == "dpo" else 1)
    row |= run.row | {"cap_gib": round(run.cap_gib or 0, 2), "num_gpus": run.num_gpus, "one_gpu": run.one_gpu}
    row |= {"gpu": card["name"], "digest": digest(run), "tokens_per_step": tokens}
    row["accumulation"] = given["gradient_accumulation_steps"]
    seconds = row.get("step_seconds", [])[1:]
    timed = run.timed and seconds and row["ok"]
    row["tokens_per_second"] = round(tokens * len(seconds) / sum(seconds)) if timed else None
    return row | {"verdict": verdict(row)}


def verdict(row: dict[str, Any]) -> str:
    """`ok`, or what is wrong; a note after `ok` where the card is not used well."""
    if not row["ok"]:
        return str(row["fault"]).strip().splitlines()[-1][:100]
    if row["steps"] < STEPS:
        return f"stopped after {row['steps']} steps"
    if row["predicted_gib"] is not None and abs(row["predicted_gib"] / row["peak_gib"] - 1) > AGREEMENT:
        return f"prediction is off by {(row['predicted_gib'] / row['peak_gib'] - 1):+.1%}"
    if row["peak_gib"] < LEAST_USE * row["cap_gib"]:
        return f"ok, but uses only {row['peak_gib'] / row['cap_gib']:.0%}"
    return "ok"


def digest(run: Run) -> str:
    """Changes with anything that a run depends on."""
    given = dict(run.arguments)
    if "deepspeed" in given:
        given["deepspeed"] = Path(given["deepspeed"]).read_text(encoding="utf-8")
    text = json.dumps([given, run.cap_gib, run.num_gpus, run.one_gpu], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""

    def number(key: str, width: int = 8) -> str:
        return f"{row[key]:{width}.2f}" if row.get(key) is not None else "-".rjust(width)

    speed = f"{row['tokens_per_second']:10,}" if row.get("tokens_per_second") else "-".rjust(10)
    return (
        f"{row['name']:28}{number('cap_gib')}{number('predicted_gib', 11)}{number('peak_gib', 10)}"
        f"{number('reserved_gib', 10)}{number('host_gib')}{speed}  {row['verdict']}"
    )


def earlier(out: Path) -> dict[str, dict[str, Any]]:
    """Rows of earlier calls by preset; the last one of each counts."""
    if not out.exists():
        return {}
    rows: dict[str, dict[str, Any]] = {}
    lines = command_line.read_text(out).splitlines()
    for text in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line: it was stopped while it wrote
            row = json.loads(text)
            rows[row["name"]] = row
    if lines and not rows:
        command_line.fail(f"{out} holds no rows of results")
    return rows


def begin_line(out: Path) -> None:
    """Makes the file of results ready for the next one, also where the last was cut off.

    Raises:
        OSError: It cannot be written.
    """
    with out.open("a+b") as file:
        file.seek(0)
        if (text := file.read()) and not text.endswith(b"\n"):
            file.write(b"\n")


def verify(chosen: list[Preset], options: argparse.Namespace, card: dict[str, Any]) -> int:
    """Runs the presets that have not got through yet, prints the table, and returns the exit code."""
    known = earlier(options.out)
    known = {} if options.fresh else known
    rows: dict[str, dict[str, Any]] = {}
    todo = []
    for preset in chosen:
        run = run_of(preset, options, card)
        before = known.get(preset.name, {})
        if before.get("digest") == digest(run) and before.get("ok"):
            rows[preset.name] = completed(run, before, card)
        else:
            todo.append(run)
    bar = tqdm(total=len(todo), unit="preset", file=sys.stderr, disable=not todo)

    def done(run: Run, row: dict[str, Any]) -> None:
        rows[run.name] = completed(run, row, card)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[run.name]) + "\n")
        bar.write(line(rows[run.name]), file=sys.stderr)
        bar.update()

    left = preset_runs.run_all(
        todo,
        jobs=options.jobs,
        card_gib=options.card_gib or card["total"] / GIB - 2,
        done=done,
        deadline=options.deadline,
    )
    bar.close()
    print("\n".join(json.dumps(row) for row in rows.values()) if options.json else table(list(rows.values())))
    for name in left:
        print(f"{name}: no time was left; the same command goes on from here", file=sys.stderr)
    return 1 if left or not all(row["verdict"].startswith("ok") for row in rows.values()) else 0


def table(rows: list[dict[str, Any]]) -> str:
    """All rows below a header."""
    header = f"{'preset':28}{'cap GiB':>8}{'predicted':>11}{'measured':>10}{'reserved':>10}{'host':>8}{'tokens/s':>10}"
    header += "  verdict"
    return "\n".join([header, *(line(row) for row in sorted(rows, key=lambda row: str(row["name"])))])


def saved_and_resumed(preset: Preset, options: argparse.Namespace, card: dict[str, Any]) -> tuple[Run, Run]:
    """Two steps of a small model that end in a checkpoint, and two more that go on from it in other processes."""
    whole = run_of(preset, options, card, model=SMALL)
    folder = ROOT / "out" / f"{preset.name}.resume"
    shutil.rmtree(folder, ignore_errors=True)
    steps: dict[str, Any] = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2, "cutoff_len": 1024}
    steps |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
    steps["dataset_dir"] = str(measure_runs.write_data("sft", 1024)[0])
    first = replace(
        whole,
        name=f"{preset.name}.saved",
        arguments=whole.arguments | steps | {"max_steps": 2},
        keeps_output=True,
        need_gib=12.0 * whole.num_gpus,
        timed=False,
    )
    going_on = {"max_steps": STEPS, "resume_from_checkpoint": str(folder / "checkpoint-2")}
    again = replace(first, name=f"{preset.name}.resumed", arguments=first.arguments | going_on, keeps_output=False)
    return first, again


def resume(chosen: list[Preset], options: argparse.Namespace, card: dict[str, Any]) -> int:
    """Trains, saves, and goes on in other processes, with every DeepSpeed preset and a small model."""
    rows: dict[str, dict[str, Any]] = {}
    chosen = [preset for preset in chosen if "deepspeed" in preset.arguments]
    pairs = {preset.name: saved_and_resumed(preset, options, card) for preset in chosen}
    for runs in zip(*pairs.values(), strict=True):
        saved = [run for run in runs if "resume_from_checkpoint" not in run.arguments or _was_saved(run)]
        preset_runs.run_all(
            saved,
            jobs=options.jobs,
            card_gib=options.card_gib or card["total"] / GIB - 2,
            done=lambda run, row: rows.update({run.name: row}),
            deadline=options.deadline,
        )
    failed = False
    for name, pair in pairs.items():
        shutil.rmtree(pair[0].arguments["output_dir"], ignore_errors=True)
        mine = [rows.get(run.name, {"ok": False, "fault": f"{run.name} did not run"}) for run in pair]
        good = all(row["ok"] for row in mine) and [len(row["step_seconds"]) for row in mine] == [2, STEPS - 2]
        failed |= not good
        faults = [str(row["fault"]).strip().splitlines()[-1] for row in mine if not row["ok"]]
        said = f"saves and resumes, losses {[row['losses'] for row in mine]}" if good else f"fails: {faults}"
        print(f"{name:28} {said}", flush=True)
    return int(failed)


def _was_saved(run: Run) -> bool:
    return Path(run.arguments["resume_from_checkpoint"]).exists()


def main() -> int:
    """Reads the options and runs what they name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="names; all of them if none is given")
    parser.add_argument(
        "--jobs", type=command_line.count, default=4, help="how many load at a time (they train one after the other)"
    )
    parser.add_argument("--memory-only", action="store_true", help="all train at once, so that speeds say nothing")
    parser.add_argument("--one-gpu", action="store_true", help="presets for several GPUs share the only one")
    parser.add_argument(
        "--accumulate", type=command_line.count, help="at most as many micro-batches a step, to save time"
    )
    parser.add_argument("--card-gib", type=float, help="share of the card, where something else runs on it too")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--fresh", action="store_true", help="run also what got through before")
    parser.add_argument("--resume", action="store_true", help="whether DeepSpeed presets go on from a checkpoint")
    parser.add_argument("--out", type=Path, default=ROOT / "presets.jsonl", help="where results are collected")
    parser.add_argument("--json", action="store_true", help="print one JSON object a preset")
    options = parser.parse_args()
    started = time.time()
    try:
        chosen = [presets.find(name) for name in options.presets] or presets.available()
    except UserError as error:
        command_line.fail(str(error))
    chosen = [preset for preset in chosen if preset.usable_bytes]
    card = preset_runs.card()
    preset_runs.prepare(deepspeed=any("deepspeed" in preset.arguments for preset in chosen))
    if not options.one_gpu:
        left_out = [preset.name for preset in chosen if preset.num_gpus > card["count"]]
        chosen = [preset for preset in chosen if preset.name not in left_out]
        if left_out:
            print(f"left out, as --one-gpu is not given: {', '.join(left_out)}", file=sys.stderr)
    too_large = [preset.name for preset in chosen if preset.usable_bytes > card["total"]]
    if too_large:
        print(f"left out, as this card is smaller than theirs: {', '.join(too_large)}", file=sys.stderr)
    chosen = [preset for preset in chosen if preset.name not in too_large]
    if not chosen:
        sys.exit("error: none of these presets can run here")
    try:
        begin_line(options.out)  # before hours of running, not after
    except OSError as error:
        sys.exit(f"error: {options.out} cannot be written: {error.strerror}")
    code = (resume if options.resume else verify)(chosen, options, card)
    print(f"{time.time() - started:.0f} s", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
