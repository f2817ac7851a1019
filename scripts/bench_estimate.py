"""Times one prediction: the median of many, over the kinds of runs that differ most in work.

usage: python scripts/bench_estimate.py [--repeat N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import command_line
from accuracy import MEASURED, prepare


KINDS = ("06_lora_2048_b1", "06_lora_2048_b4_lg", "06_lora_1024_b4_nogc", "32b_qlora_1024_lg", "06_full_2048_b1")


def main() -> None:
    """Prints milliseconds a prediction, argument parsing left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=command_line.count, default=200)
    repeat = parser.parse_args().repeat
    plan = json.loads((MEASURED / "calibration" / "cases.json").read_text())
    cases = {case["id"]: case for case in plan["cases"]}
    for kind in KINDS:
        estimate = prepare(cases[kind], plan["models"])
        seconds = []
        for _ in range(repeat):
            started = time.perf_counter()
            estimate()
            seconds.append(time.perf_counter() - started)
        print(f"{kind:24s} {statistics.median(seconds) * 1e3:6.2f} ms")


if __name__ == "__main__":
    main()
