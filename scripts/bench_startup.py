"""Measure what the plugin adds to the start of a Python interpreter.

Two fresh environments, one with the plugin's wheel, start in turn. The order changes with every pair, so that a drift
of the machine hits both alike.

    python scripts/bench_startup.py [--starts 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import command_line


ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "llamafactory-preflight"
WARM_UP = 5


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment without pip and returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def install_plugin(python: Path, folder: Path) -> None:
    """Builds a wheel from this tree and installs it without dependencies."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    commands = [["wheel", "--no-deps", "--wheel-dir", folder, ROOT]]
    commands += [["--python", python, "install", "--no-deps", "--no-index", "--find-links", folder, DISTRIBUTION]]
    for command in commands:
        done = subprocess.run([*pip, *command], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            command_line.fail(f"pip cannot install this project in an environment of its own: {why}")


def start_seconds(python: Path) -> float:
    """Starts an interpreter that does nothing and returns how long that took."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    began = time.perf_counter()
    subprocess.run([python, "-c", "pass"], check=True, env=env)
    return time.perf_counter() - began


def main() -> None:
    """Prints the two medians, their difference and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--starts", type=command_line.count, default=200, help="starts of each interpreter (default: 200)"
    )
    starts = parser.parse_args().starts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, hooked = make_environment(folder / "plain"), make_environment(folder / "hooked")
        install_plugin(hooked, folder)
        seconds: dict[Path, list[float]] = {plain: [], hooked: []}
        for number in range(starts + WARM_UP):
            for python in (plain, hooked) if number % 2 else (hooked, plain):
                seconds[python].append(start_seconds(python))
    without, with_plugin = (statistics.median(taken[WARM_UP:]) * 1000 for taken in seconds.values())
    print(f"Python {sys.version.split()[0]}, {starts} starts each, medians")
    print(f"without the plugin  {without:6.2f} ms")
    print(f"with the plugin     {with_plugin:6.2f} ms")
    print(f"added               {with_plugin - without:6.2f} ms (ratio {with_plugin / without:.2f})")


if __name__ == "__main__":
    main()
