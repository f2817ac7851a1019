"""Times how long LLaMA-Board's page takes to load with the plugin and without, in a real browser.

    python scripts/bench_board.py [--rounds 10]

Two servers run side by side, and their pages are loaded in turns, so that both see the same state of the machine.
Exits with 1 if the plugin makes it more than 10 % slower, and with 2 if it cannot be timed here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import board
import command_line


MOST_RATIO = 1.10


def ratio(without: Sequence[float], with_plugin: Sequence[float]) -> float:
    """How many times as long the median load takes with the plugin."""
    return median(with_plugin) / median(without)


def status(slower: float) -> int:
    """The exit status for a ratio."""
    return int(slower > MOST_RATIO)


def load_seconds(browser: Any, address: str) -> float:
    """From the request until every event that loading fires is answered; the quiet time at its end left out."""
    page = board.BoardPage(browser.new_page(viewport={"width": 1280, "height": 900}), address)
    began = time.perf_counter()
    page.open()
    seconds = time.perf_counter() - began - board.QUIET_ROUNDS * board.ROUND_SECONDS
    page.page.close()
    return seconds


def main() -> int:
    """Parse the command line, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=command_line.count, default=10)
    rounds = parser.parse_args().rounds
    executable = board.chromium()
    if executable is None:
        print("bench_board: no Chromium here; name one with CHROMIUM", file=sys.stderr)
        return 2
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        command_line.fail("there is no playwright here: install this project's `test` extra")

    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        places = [Path(folder, name) for name in ("without", "with")]
        for place in places:
            place.mkdir()
        with (
            board.webui(places[0], scripts, LLAMAFACTORY_PREFLIGHT="off", HF_HUB_OFFLINE="1") as without,
            board.webui(places[1], scripts, HF_HUB_OFFLINE="1") as with_plugin,
        ):
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            times: dict[str, list[float]] = {without: [], with_plugin: []}
            for number in range(rounds + 1):
                for address in sorted(times, reverse=bool(number % 2)):  # neither is always the first
                    times[address].append(load_seconds(browser, address))
            browser.close()
    before, after = times[without][1:], times[with_plugin][1:]  # the first round fills caches
    slower = ratio(before, after)
    print(
        f"without {median(before):.3f} s, with {median(after):.3f} s, ratio {slower:.3f}, at most {MOST_RATIO:.2f}"
        f" (medians of {rounds})"
    )
    return status(slower)


if __name__ == "__main__":
    sys.exit(main())
