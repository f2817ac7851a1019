"""Compares predictions with measured runs and prints every row, the worst first.

usage: python scripts/accuracy.py [--accept] [FOLDER ...]     (default: every folder of tests/measured)
       python scripts/accuracy.py --predict FOLDER ...        (before the runs: adds to predictions.jsonl)

With --accept, what is predicted now is written to predicted_now.json, which a test compares, and the tables to
tests/measured/README.md. A folder has cases.json (models and arguments, as scripts/measure_runs.py reads them) and
measured.jsonl (what it wrote).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import command_line
from llamafactory_preflight import memory, verdict
from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.run import from_arguments
from llamafactory_preflight.software import Software
from measure_images import patches
from measure_runs import DEFAULTS


GIB = 2**30
MEASURED = Path(__file__).resolve().parent.parent / "tests" / "measured"
MARK = "<!-- written by scripts/accuracy.py --accept -->"
SOFTWARE = Software(
    llamafactory="0.9.5", torch="2.11.0", transformers="5.6.0", peft="0.18.1", accelerate="1.11.0", trl="0.24.0",
    bitsandbytes="0.50.2", liger_kernel="0.8.5",
)  # fmt: skip
"""What every run in tests/measured used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Main memory of all processes while they train: measured, predicted, and predicted before the run."""

    measured: int
    predicted: int
    beforehand: int | None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run: measured and predicted peaks in bytes; `measured` is None where it ran out of memory.

    `evaluation` is measured and predicted, `beforehand` the prediction that was committed before the run.
    """

    id: str
    measured: int | None
    predicted: int
    low: int
    high: int
    cap: int | None
    need: int
    verdict: str | None
    evaluation: tuple[int, int] | None
    beforehand: int | None
    host: Host | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; negative where it is too small."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the truth lies within the bounds."""
        return self.measured is not None and self.low <= self.measured <= self.high


def prepare(case: dict[str, Any], models: dict[str, Any]) -> Callable[[], memory.MemoryEstimate]:
    """Parses one case; the call then predicts it for the card that the runs were measured on."""
    args = DEFAULTS | case["args"] | {"model_name_or_path": case["model"], "output_dir": "out", "dataset": "rows"}
    if args.pop("with_eval_dataset", False):
        args["eval_dataset"] = "rows"
    software = replace(SOFTWARE, **case.get("software", {}))
    run = from_arguments(args, software=software, origin=case["id"])
    if "accelerate" in case:
        run = replace(run, accelerate=fsdp.from_accelerate(case["accelerate"], origin=case["id"]))
    expandable = "expandable_segments:True" in case.get("env", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    card = memory.Card(compute_capability=(9, 0), expandable_segments=expandable)
    shape = ModelShape.from_config(models[case["model"]])
    count = case.get("ranks", 1)
    ranks = memory.Ranks(world=count, local=count)
    images = None
    if case.get("images"):
        sizes = [patches(models[case["model"]], *size, max_pixels=run.image_max_pixels) for size in case["images"]]
        images = Images(patches=tuple(sizes), exact=True, reason="These are the images of the case.")
    return partial(memory.estimate, run, shape, software=software, card=card, ranks=ranks, images=images)


def replay(folder: Path) -> Iterator[Row]:
    """Predicts every measured case of a folder, but for those that no formula covers and runs with other errors."""
    plan = command_line.read_cases(folder / "cases.json")
    measured = {row["id"]: row for row in command_line.read_rows(folder / "measured.jsonl", "id", "ok")}
    committed = folder / "predictions.jsonl"
    early = {row["id"]: row for row in command_line.read_rows(committed, "id")} if committed.exists() else {}
    for case in plan["cases"]:
        result = measured.get(case["id"])
        if result is None or not (_trained(case, result) or result.get("out_of_memory")):
            continue
        try:
            estimate = prepare(case, plan["models"])()
        except Unmodelled:
            continue
        yield _row(case, result, estimate, early.get(case["id"]) or _expected(case))


def _expected(case: dict[str, Any]) -> dict[str, Any]:
    """The prediction that a case itself was committed with."""
    peak = case.get("expected", {}).get("peak_gib")
    return {"peak_allocated_bytes": round(peak * GIB)} if peak else {}


def _trained(case: dict[str, Any], result: dict[str, Any]) -> bool:
    """Whether all steps were made: LLaMA-Factory may still fail to save a reward model whose weights are tied."""
    steps = result.get("step_peak_allocated_gib", [])
    return result["ok"] or len(steps) == (DEFAULTS | case["args"])["max_steps"]


def _row(case: dict[str, Any], result: dict[str, Any], estimate: memory.MemoryEstimate, early: dict[str, Any]) -> Row:
    cap = round(case["cap_gib"] * GIB) if "cap_gib" in case else None
    word = verdict.judge_gpu(estimate, context_bytes=0, budget_bytes=cap).word if cap else None
    evaluation = result.get("evaluate_peak_allocated_gib")
    # Measured over the steps: where loading takes more, as before DeepSpeed casts what is trained, it is left out.
    busy = _busy(estimate)
    share = busy / estimate.peak_allocated_bytes
    return Row(
        id=case["id"],
        measured=round(_peak(result) * GIB) if _trained(case, result) else None,
        predicted=busy,
        low=round(estimate.low_bytes * share),
        high=round(estimate.high_bytes * share),
        cap=cap,
        need=verdict.needed_bytes(estimate, context_bytes=0),
        verdict=word,
        evaluation=(round(evaluation * GIB), estimate.phases["evaluate"]) if evaluation else None,
        beforehand=early.get("peak_allocated_bytes"),
        host=_host(case, result, estimate, early),
    )


def _busy(estimate: memory.MemoryEstimate) -> int:
    return max(estimate.phases["forward_backward"], estimate.phases["optimizer_step"])


def _peak(result: dict[str, Any]) -> float:
    """The highest peak of all steps, of several ranks that of the fullest."""
    return float(result["peak_allocated_gib"] if "per_rank" in result else max(result["step_peak_allocated_gib"]))


def _host(
    case: dict[str, Any], result: dict[str, Any], estimate: memory.MemoryEstimate, early: dict[str, Any]
) -> Host | None:
    """What ranks held themselves; a run without ranks knows its resident size only, which files hardly raise there.

    Ranks used to leave while the first one saved the model, so that a row of that time says too little of the save.
    """
    if case.get("save") and not result.get("ranks_wait"):
        return None
    alone = result.get("host_peak_rss_gib") if "deepspeed" in case["args"] else None
    measured = result.get("host_own_gib", alone)
    if not measured:
        return None
    predicted = estimate.host_bytes if case.get("save") else estimate.host_training_bytes
    return Host(measured=round(measured * GIB), predicted=predicted, beforehand=early.get("host_bytes"))


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, the largest error first and runs that were out of memory last."""
    lines = [
        "| run | measured GiB | predicted GiB | error | error beforehand | verdict under the cap |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -max(map(abs, _errors(row)), default=-1.0)):
        measured = "out of memory" if row.measured is None else f"{row.measured / GIB:.2f}"
        now, before = (f"{error:+.2%}" if error is not None else "" for error in (row.error, _beforehand(row)))
        capped = f"{row.verdict} ({row.cap / GIB:g})" if row.cap else ""
        lines.append(f"| {row.id} | {measured} | {row.predicted / GIB:.2f} | {now} | {before} | {capped} |")
    return "\n".join([*lines, *_host_table(rows)])


def _host_table(rows: Sequence[Row]) -> list[str]:
    """The same for main memory, where it was measured."""
    hosts = sorted(((row.host, row.id) for row in rows if row.host), key=lambda pair: -_host_worst(pair[0]))
    if not hosts:
        return []
    lines = [
        "",
        "| run | main memory GiB | predicted GiB | error | error beforehand |",
        "|---|---|---|---|---|",
    ]
    for host, name in hosts:
        before = f"{host.beforehand / host.measured - 1:+.1%}" if host.beforehand else ""
        sizes = f"{host.measured / GIB:.2f} | {host.predicted / GIB:.2f}"
        lines.append(f"| {name} | {sizes} | {host.error:+.1%} | {before} |")
    return lines


def _host_worst(host: Host) -> float:
    before = host.beforehand / host.measured - 1 if host.beforehand else 0.0
    return max(abs(host.error), abs(before))


def _beforehand(row: Row) -> float | None:
    return row.beforehand / row.measured - 1 if row.beforehand and row.measured else None


def _errors(row: Row) -> list[float]:
    return [error for error in (row.error, _beforehand(row)) if error is not None]


def summary(rows: Sequence[Row]) -> str:
    """Median, worst below, worst above, share inside the bounds and their width; and what was predicted beforehand."""
    finished = [row for row in rows if row.measured is not None]
    if not finished:
        return "No finished run"
    inside = sum(row.inside for row in finished) / len(finished)
    width = statistics.median((row.high - row.low) / row.predicted for row in finished)
    text = _spread([row.error for row in finished if row.error is not None])
    text += f"; {inside:.0%} inside the bounds, which are {width:.1%} wide in the median"
    early = [error for error in map(_beforehand, finished) if error is not None]
    return text + (f". Beforehand: {_spread(early)}" if early else "")


def _spread(errors: Sequence[float]) -> str:
    median = statistics.median(map(abs, errors))
    return f"{len(errors)} finished runs, median error {median:.3%}, worst {min(errors):+.2%} and {max(errors):+.2%}"


def predict(folder: Path) -> None:
    """Writes what is predicted of the cases that have no prediction yet; what was written before stays."""
    plan = command_line.read_cases(folder / "cases.json")
    written = folder / "predictions.jsonl"
    known = command_line.rows_to_add_to(written, "id")
    names = {row["id"] for row in known}
    rows = [_prediction(case, prepare(case, plan["models"])()) for case in plan["cases"] if case["id"] not in names]
    command_line.write_whole([(written, "".join(json.dumps(row) + "\n" for row in [*known, *rows]))])


def _prediction(case: dict[str, Any], estimate: memory.MemoryEstimate) -> dict[str, Any]:
    """Peaks as they are measured: while the steps run, and in main memory with the saving only where it saves."""
    return asdict(estimate) | {
        "id": case["id"],
        "peak_allocated_bytes": _busy(estimate),
        "host_bytes": estimate.host_bytes if case.get("save") else estimate.host_training_bytes,
    }


def main() -> None:
    """Prints the tables; with --accept writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="by default every one with results")
    parser.add_argument(
        "--accept", action="store_true", help="write predicted_now.json, without FOLDER the tables too"
    )
    parser.add_argument("--predict", action="store_true", help="add to predictions.jsonl instead, before the runs")
    options = parser.parse_args()
    needed = ("cases.json",) if options.predict else ("cases.json", "measured.jsonl")
    missing = [str(one) for one in options.folders if not all((one / name).is_file() for name in needed)]
    if missing or (options.predict and not options.folders):
        parser.error(f"name folders with {' and '.join(needed)}; {', '.join(missing) or 'none'} is not one")
    if options.accept and options.predict:
        parser.error("give --accept or --predict, not both")
    if options.predict:
        for folder in options.folders:
            predict(folder)
        return
    parts, files = [], []
    for folder in options.folders or sorted(path.parent for path in MEASURED.glob("*/measured.jsonl")):
        rows = list(replay(folder))
        parts.append(f"## {folder.name}\n\n{summary(rows)}.\n\n{table(rows)}\n")
        known = {row.id: row.predicted for row in rows}
        files.append((folder / "predicted_now.json", json.dumps(known, indent=1) + "\n"))
    print("\n".join(parts))
    if options.accept and not options.folders:
        readme = MEASURED / "README.md"
        head = readme.read_text().split(MARK)[0]
        files.append((readme, head + MARK + "\n\n" + "\n".join(parts)))
    if options.accept:
        command_line.write_whole(files)


if __name__ == "__main__":
    main()
