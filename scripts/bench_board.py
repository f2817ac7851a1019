"""Times how long LLaMA-Board's page takes to load with the plugin and without, in a real browser.

    python scripts/bench_board.py [--rounds 10]

Two servers run side by side, and their pages are loaded in turns, so that both see the same state of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import board


def load_seconds(browser: Any, address: str) -> float:
    """From the request until every event that loading fires is answered; the quiet time at its end left out."""
    page = board.BoardPage(browser.new_page(viewport={"width": 1280, "height": 900}), address)
    began = time.perf_counter()
    page.open()
    seconds = time.perf_counter() - began - board.QUIET_SECONDS
    page.page.close()
    return seconds


def main() -> int:
    """Parse the command line, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    executable = board.chromium()
    if executable is None:
        print("bench_board: no Chromium here; name one with CHROMIUM", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

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
            pairs = [(load_seconds(browser, without), load_seconds(browser, with_plugin)) for _ in range(rounds + 1)]
            browser.close()
    before, after = (median(times) for times in zip(*pairs[1:], strict=True))  # the first round fills caches
    print(f"without {before:.3f} s, with {after:.3f} s, ratio {after / before:.3f} (medians of {rounds})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
