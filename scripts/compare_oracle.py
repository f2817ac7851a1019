"""Compares the formula with the simulation over a generated grid of runs, and prints a summary.

usage: python scripts/compare_oracle.py [--accept] [--count N] [--seed S] [--jobs J] [--only INDEX] [--limit SECONDS]

Each configuration takes one option of every axis below. With --accept the table, the worst first, is written to
tests/measured/oracle_grid.md, and the rows behind it to oracle_grid.jsonl beside it. Simulations that are there
already are not run again; formulas always are. It runs on any machine, without a GPU, in the environment of
scripts/test.sh.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
from llamafactory_preflight import memory
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


MIB = 2**20
MEASURED = Path(__file__).resolve().parent.parent / "tests" / "measured"
TABLE = MEASURED / "oracle_grid.jsonl"
COUNT, SEED = 310, 3
COMMON = {"do_train": True, "stage": "sft", "dataset": "rows", "output_dir": "out", "lora_target": "all"}
ATTENTION_TARGETS = "q_proj,k_proj,v_proj,o_proj"
FULL: dict[str, Any] = {"finetuning_type": "full"}
FREEZE: dict[str, Any] = {"finetuning_type": "freeze"}
AXES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "model": {
        name: {"model_name_or_path": name}
        for name in (
            "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen2.5-1.5b", "qwen2.5-7b",
            "llama3.2-1b", "llama3.1-8b", "mistral-7b", "gemma3-1b", "qwen3-30b-a3b", "qwen3-moe-12l",
        )
    },
    "method": {
        "lora 8 all": {"lora_rank": 8},
        "lora 16 q v": {"lora_rank": 16, "lora_target": "q_proj,v_proj"},
        "lora 64 attention": {"lora_rank": 64, "lora_target": ATTENTION_TARGETS, "use_rslora": True},
        "lora 32 mlp": {"lora_rank": 32, "lora_target": "gate_proj,up_proj,down_proj"},
        "lora and head": {"lora_rank": 8, "additional_target": "embed_tokens,lm_head"},
        "dora 16": {"lora_rank": 16, "use_dora": True},
        "qlora 4 bit": {"lora_rank": 16, "quantization_bit": 4},
        "qlora 4 bit attention": {"lora_rank": 8, "lora_target": ATTENTION_TARGETS, "quantization_bit": 4},
        "qlora fp4 plain": {"quantization_bit": 4, "quantization_type": "fp4", "double_quantization": False},
        "qlora 8 bit": {"lora_rank": 16, "quantization_bit": 8},
        "lora pure_bf16": {"lora_rank": 8, "pure_bf16": True},
        "full": FULL,
        "full pure_bf16": FULL | {"pure_bf16": True},
        "freeze last 2": FREEZE | {"freeze_trainable_layers": 2},
        "freeze first 3": FREEZE | {"freeze_trainable_layers": -3},
        "freeze pure_bf16": FREEZE | {"freeze_trainable_layers": 4, "pure_bf16": True},
    },
    "batch": {str(n): {"per_device_train_batch_size": n} for n in (1, 2, 4)},
    "cutoff": {str(n): {"cutoff_len": n} for n in (512, 1001, 2048, 4096)},
    "liger": {"off": {}, "on": {"enable_liger_kernel": True}},
    "checkpointing": {
        "reentrant": {},
        "non-reentrant": {"use_reentrant_gc": False},
        "unsloth": {"use_unsloth_gc": True},
        "off": {"disable_gradient_checkpointing": True},
    },
    "attention": {"auto": {}, "sdpa": {"flash_attn": "sdpa"}, "eager": {"flash_attn": "disabled"}},
    "packing": {"none": {}, "plain": {"packing": True}, "neat": {"neat_packing": True}},
    "accumulation": {str(n): {"gradient_accumulation_steps": n} for n in (1, 2, 4)},
    "optimizer": {
        "default": {},
        **{
            name: {"optim": name}
            for name in ("adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor", "lion_32bit", "sgd")
        },
    },
    "precision": {"bf16": {"bf16": True}, "fp16": {"fp16": True}},
    "dropout": {"0": {}, "0.05": {"lora_dropout": 0.05}},
    "expandable segments": {"on": {}, "off": {}},
    "besides": {
        "nothing": {},
        "evaluation": {"eval_dataset": "rows", "eval_strategy": "steps", "per_device_eval_batch_size": 2},
        "neftune": {"neftune_noise_alpha": 5},
        "upcast_layernorm": {"upcast_layernorm": True},
        "upcast_lmhead_output": {"upcast_lmhead_output": True},
    },
}  # fmt: skip
"""Name of an axis to its options; an option is a label and the LLaMA-Factory arguments that it sets."""
RARE = {"packing": (4, 1, 1), "besides": (6, 1, 1, 1, 1), "attention": (3, 1, 2)}
"""Weights of an axis' options where they are not drawn equally often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One configuration by its label on every axis, and both predictions in bytes by phase."""

    labels: Mapping[str, str]
    formula: Mapping[str, int]
    oracle: Mapping[str, int]
    seconds: float = 0.0
    unknown: str = ""

    @property
    def difference(self) -> float:
        """Relative difference of the peaks; negative where the formula says less."""
        return self.formula["peak"] / self.oracle["peak"] - 1


def configurations(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, str]]:
    """Draws labels, one of every axis; no two alike, none that LLaMA-Factory refuses."""
    draw = random.Random(seed)
    seen = set()
    while len(seen) < count:
        labels = {axis: draw.choices(list(options), RARE.get(axis))[0] for axis, options in AXES.items()}
        key = tuple(labels.values())
        if key not in seen and is_possible(labels):
            seen.add(key)
            yield labels


def is_possible(labels: Mapping[str, str]) -> bool:
    """Leaves out what LLaMA-Factory or PEFT refuses, and settings that would not do anything."""
    method = labels["method"]
    adapter, pure = "lora" in method or "dora" in method, "pure" in method
    experts = "a3b" in labels["model"] or "moe" in labels["model"]
    return not (
        (pure and labels["precision"] == "fp16")
        or (labels["dropout"] != "0" and not adapter)
        or (labels["packing"] != "none" and int(labels["cutoff"]) % 8)  # positions would be shorter than the tokens
        or (experts and "mlp" in method)  # experts are no linear modules
    )


def parse(labels: Mapping[str, str]) -> tuple[RunDescription, memory.Card, dict[str, Any]]:
    """A configuration as a run, its card and its model's config.json."""
    arguments = dict(COMMON)
    for axis, label in labels.items():
        arguments |= AXES[axis][label]
    if arguments.get("pure_bf16"):
        arguments["bf16"] = False
    run = from_arguments(arguments, software=Software.installed(), origin="the grid")
    card = memory.Card(compute_capability=(9, 0), expandable_segments=labels["expandable segments"] == "on")
    return run, card, models()[labels["model"]]


def models() -> dict[str, Any]:
    """The models of the measured runs."""
    found: dict[str, Any] = {}
    for file in sorted(MEASURED.glob("*/cases.json")):
        found |= json.loads(file.read_text())["models"]
    return found


def by_phase(estimate: memory.MemoryEstimate) -> dict[str, int]:
    """Bytes of every phase, and the peak over loading and training."""
    return {"peak": estimate.peak_allocated_bytes, **estimate.phases}


def by_formula(labels: Mapping[str, str]) -> dict[str, int]:
    """The formula's answer."""
    run, card, config = parse(labels)
    shape = ModelShape.from_config(config)
    return by_phase(memory.estimate(run, shape, software=Software.installed(), card=card))


def by_simulation(labels: Mapping[str, str]) -> dict[str, int]:
    """The simulation's answer."""
    from llamafactory_preflight import simulate

    run, card, config = parse(labels)
    return by_phase(simulate.estimate(run, config, software=Software.installed(), card=card))


def compare(labels: Mapping[str, str], known: Row | None = None) -> Row:
    """Both answers; the simulation's from a known row if there is one."""
    oracle, seconds, unknown = (known.oracle, known.seconds, known.unknown) if known else ({}, 0.0, "")
    if known is None:
        started = time.perf_counter()
        try:
            oracle = by_simulation(labels)
        except Unmodelled as error:
            unknown = error.reason
        seconds = round(time.perf_counter() - started, 1)
    return Row(labels=labels, formula=by_formula(labels), oracle=oracle, seconds=seconds, unknown=unknown)


def read(file: Path = TABLE) -> dict[tuple[str, ...], Row]:
    """Rows that were written before, by their labels."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {tuple(row.labels.values()): row for row in rows}


def as_line(row: Row) -> str:
    """A row of the JSON lines."""
    names = ("labels", "formula", "oracle", "seconds", "unknown")
    return json.dumps({name: getattr(row, name) for name in names}) + "\n"


def table(rows: Sequence[Row]) -> str:
    """The whole Markdown file."""
    done = sorted((row for row in rows if not row.unknown), key=lambda row: -abs(row.difference))
    seconds, errors = [row.seconds for row in done], [row.difference for row in done]
    lines = [
        "# Formula and simulation", "",
        "Both predictions of generated runs on a Hopper card; written by `scripts/compare_oracle.py`. The difference",
        "is of the formula's peak from the simulation's, which runs the real step on tensors without storage.", "",
        f"{len(done)} configurations: median {statistics.median(map(abs, errors)):.3%}, worst {min(errors):+.2%} and "
        f"{max(errors):+.2%}; {sum(abs(error) <= 0.01 for error in errors) / len(done):.1%} are within 1 %. "
        f"A simulation took {statistics.median(seconds):.1f} s in the median and {max(seconds):.1f} s at most.", "",
        "## By axis", "", "| axis | option | runs | median | worst |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for axis, options in AXES.items():
        for label in options:
            errors = [row.difference for row in done if row.labels[axis] == label]
            if errors:
                worst, median = max(errors, key=abs), statistics.median(map(abs, errors))
                lines.append(f"| {axis} | {label} | {len(errors)} | {median:.3%} | {worst:+.2%} |")
    axes = list(AXES)
    lines += ["", "## All", "", f"| difference | formula MiB | simulation MiB | {' | '.join(axes)} |"]
    lines.append("|---" * (3 + len(axes)) + "|")
    for row in done:
        sizes = " | ".join(f"{size['peak'] / MIB:.1f}" for size in (row.formula, row.oracle))
        lines.append(f"| {row.difference:+.2%} | {sizes} | {' | '.join(row.labels[axis] for axis in axes)} |")
    refused = [row for row in rows if row.unknown]
    if refused:
        lines += ["", "## Not simulated", ""]
        lines += [f"* {', '.join(row.labels.values())}: {row.unknown}" for row in refused]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Completes the grid and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="write the table and its rows")
    parser.add_argument("--count", type=command_line.count, default=COUNT, help="configurations of the grid")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=command_line.count, default=1, help="processes; each takes about 1 GiB")
    parser.add_argument("--only", type=int, help="run one configuration and print it, without the table")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds; go on later")
    options = parser.parse_args()
    if options.only is not None and not 0 <= options.only < options.count:
        parser.error(f"--only takes 0 to {options.count - 1}, one below --count")
    os.environ.update(DISABLE_VERSION_CHECK="1", HF_HUB_OFFLINE="1")  # before the libraries load, in every process
    grid = list(configurations(options.count, options.seed))
    if options.only is not None:
        row = compare(grid[options.only])
        print(as_line(row), "" if row.unknown else f"{row.difference:+.3%}")
        return
    from tqdm import tqdm

    known = read()
    missing = [labels for labels in grid if tuple(labels.values()) not in known]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in tqdm(pool.imap(compare, missing), total=len(missing), unit="run"):
            known[tuple(row.labels.values())] = row
            if options.accept:  # so that a run that is interrupted goes on from here
                with TABLE.open("a") as file:
                    file.write(as_line(row))
            if time.monotonic() - started > options.limit:
                pool.terminate()
                break
    rows = [compare(labels, known[key]) for labels in grid if (key := tuple(labels.values())) in known]
    if all(row.unknown for row in rows):
        command_line.fail("no configuration was simulated in that time")
    written = table(rows)
    if options.accept:
        command_line.write_whole([(TABLE, "".join(map(as_line, rows))), (TABLE.with_suffix(".md"), written)])
    print(written.split("\n## ")[0])


if __name__ == "__main__":
    main()
