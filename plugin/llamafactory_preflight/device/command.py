"""The output of a vendor's tool, for the devices that have no file or library to read."""

from __future__ import annotations

import shutil
import subprocess


SECONDS = 10


def output(*command: str) -> str | None:
    """What a command prints, or None where it does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
