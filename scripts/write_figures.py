"""Writes what was measured into the records, the headers of the presets and the tables of the README.

usage: python scripts/write_figures.py [RESULTS.jsonl ...] [--speed RESULTS.jsonl ...]

Results are what `verify_presets.py --out` collected and, after --speed, what `compare_speed.py --json` printed.
Without any it only writes headers and tables again from the records, presets/measured.json and presets/speed.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

import command_line


ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "presets/measured.json"
SPEED = ROOT / "presets/speed.json"
README = ROOT / "README.md"
MARKS = ("<!-- presets: written by scripts/write_figures.py -->", "<!-- end of presets -->")
SPEED_MARKS = ("<!-- speed: written by scripts/write_figures.py -->", "<!-- end of speed -->")
OTHERS = ("example", "recipe")
KEPT = (
    "peak_gib", "predicted_gib", "cap_gib", "reserved_gib", "host_gib", "tokens_per_step", "tokens_per_second",
    "accumulation", "num_gpus", "one_gpu", "gpu",
)  # fmt: skip
BATCH = {"num_gpus", "tokens_per_step", "accumulation"}
SPEED_KEPT = ("mix", "preset", "arm", "changed", "peak_gib")
SPEED_ROUNDED = ("samples_per_second", "tokens_per_second", "mfu")


def read_results(file: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the runs of a file that got through; the last one of each preset counts.

    A run that was not timed leaves the speed that another one of the same settings had. What ran with other settings
    than the preset has now is left out.
    """
    for row in command_line.read_rows(file, "name", "ok"):
        preset = ROOT / f"presets/{row['name']}.yaml"
        given = yaml.safe_load(preset.read_text(encoding="utf-8")) if preset.exists() else None
        if row["ok"] and given is not None and BATCH <= row.keys() and not is_of(row, given):
            print(f"{row['name']}: ran with other settings, left out", file=sys.stderr)
        elif row["ok"] and given is not None:
            missing = [key for key in KEPT if key not in row]
            if missing:
                command_line.fail(f"{file}: the row of {row['name']} has no {', '.join(missing)}")
            before = record.get(row["name"], {})
            kept = {key: row[key] for key in KEPT}
            if kept["tokens_per_second"] is None and before.get("tokens_per_step") == kept["tokens_per_step"]:
                kept["tokens_per_second"] = before["tokens_per_second"]
            record[row["name"]] = kept
    return dict(sorted(record.items()))


def is_of(row: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a run had the batch of a preset. Fewer micro-batches a step are enough, but in full tuning two.

    The gradients that a second one finds are as large as the model there; a header tells of fewer.
    """
    steps = given["gradient_accumulation_steps"]
    least = min(2, steps) if given["finetuning_type"] == "full" else 1
    whole = tokens_per_step(given, row["num_gpus"]) // steps * row["accumulation"]
    return bool(row["tokens_per_step"] == whole and least <= row["accumulation"] <= steps)


def measured_line(name: str, record: dict[str, Any], given: dict[str, Any]) -> str:
    """The line of a preset's header that tells what was measured."""
    row = record.get(name)
    if row is None:
        return "# Measured: not yet."
    shared = ", two processes on one" if row["one_gpu"] and row["num_gpus"] > 1 else ""
    each = " on each GPU" if row["num_gpus"] > 1 else ""
    steps = given["gradient_accumulation_steps"]
    fewer = f", {row['accumulation']} of {steps} micro-batches a step" if row["accumulation"] < steps else ""
    speed = f"; {row['tokens_per_second']:,} tokens a second" if row["tokens_per_second"] else ""
    return (
        f"# Measured: {row['peak_gib']:.2f} GiB{each} of the {row['cap_gib']:.1f} that the smallest such card offers"
        f"{speed} ({row['gpu']} under that cap{shared}{fewer})."
    )


def tokens_per_step(given: dict[str, Any], num_gpus: int) -> int:
    """Tokens of one optimizer step on all GPUs, at full length; both answers of a pair count."""
    micro = given["cutoff_len"] * given["per_device_train_batch_size"] * (2 if given["stage"] == "dpo" else 1)
    return int(micro * given["gradient_accumulation_steps"] * num_gpus)


def table(record: dict[str, Any]) -> str:
    """The README's table of presets with a tier."""
    lines = [
        "| preset | model | tokens: longest, a step | measured GiB of | tokens/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for file in sorted((ROOT / "presets").glob("*gb_*.yaml"), key=_order):
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        row = record.get(file.stem)
        peak = f"{row['peak_gib']:.2f} of {row['cap_gib']:.1f}" if row else "not yet"
        speed = f"{row['tokens_per_second']:,}" if row and row["tokens_per_second"] else ""
        model = given["model_name_or_path"].rpartition("/")[2]
        step = f"{given['cutoff_len']:,}, {tokens_per_step(given, _gpus(file)):,}"
        lines.append(f"| `presets/{file.name}` | {model} | {step} | {peak} | {speed} |")
    return "\n".join(lines)


def read_speed(file: Path, record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record of speeds with the runs of a file that got through; the last one of each arm counts."""
    found = {(row["mix"], row["preset"], row["arm"]): row for row in record}
    for row in command_line.read_rows(file, "mix", "preset", "arm", "ok"):
        if row["ok"] and "samples_per_second" in row:
            missing = [key for key in (*SPEED_KEPT, *SPEED_ROUNDED, "step_seconds") if key not in row]
            if missing:
                command_line.fail(f"{file}: the row of {row['preset']} has no {', '.join(missing)}")
            kept = {key: row[key] for key in SPEED_KEPT}
            rounded = {key: round(row[key], 4) for key in SPEED_ROUNDED}
            found[row["mix"], row["preset"], row["arm"]] = (
                kept | rounded | {"timed_steps": len(row["step_seconds"]) - 1}
            )
    return [found[key] for key in sorted(found)]


def speed_table(record: list[dict[str, Any]]) -> str:
    """The README's table of speeds: the preset's own, and how many times that of the others it is."""
    lines = [
        "| samples | preset | samples/s | of the card's peak | over LLaMA-Factory's example | over the usual recipe |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    speeds = {(row["mix"], row["preset"], row["arm"]): row["samples_per_second"] for row in record}
    for row in sorted(
        record, key=lambda row: (row["mix"] != "short", int(row["preset"].split("gb_")[0]), row["preset"])
    ):
        if row["arm"] != "preset":
            continue
        own = row["samples_per_second"]
        others = [speeds.get((row["mix"], row["preset"], arm)) for arm in OTHERS]
        times = " | ".join(f"{own / other:.1f}x" if other else "not yet" for other in others)
        lines.append(f"| {row['mix']} | `{row['preset']}` | {own:.1f} | {row['mfu']:.0%} | {times} |")
    return "\n".join(lines)


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """A text with what stands between two marks replaced."""
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n{new}\n{marks[1]}{rest.split(marks[1])[1]}"


def _gpus(file: Path) -> int:
    match = re.match(r"(\d+)x", file.name)
    return int(match[1]) if match else 1


def _order(file: Path) -> tuple[int, int, str]:
    match = re.search(r"(\d+)gb_", file.name)
    assert match
    return (_gpus(file), int(match[1]), file.name)


def main() -> None:
    """Writes the records if there are results, then what shows them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--speed", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    speed: list[dict[str, Any]] = json.loads(SPEED.read_text(encoding="utf-8")) if SPEED.exists() else []
    for file in options.results:
        record = read_results(file, record)
    for file in options.speed:
        speed = read_speed(file, speed)
    written = [(RECORD, json.dumps(record, indent=2) + "\n"), (SPEED, json.dumps(speed, indent=1) + "\n")]
    for file in (ROOT / "presets").glob("*gb_*.yaml"):
        text = file.read_text(encoding="utf-8")
        line = measured_line(file.stem, record, yaml.safe_load(text))
        written.append((file, re.sub(r"(?m)^# Measured: .*$", line, text, count=1)))
    text = README.read_text(encoding="utf-8")
    lost = [mark for mark in (*MARKS, *SPEED_MARKS) if text.count(mark) != 1]
    if lost:
        command_line.fail(f"{README} does not have `{lost[0]}` once, which marks where figures go")
    text = between(between(text, MARKS, table(record)), SPEED_MARKS, speed_table(speed))
    command_line.write_whole([*written, (README, text)])


if __name__ == "__main__":
    main()
