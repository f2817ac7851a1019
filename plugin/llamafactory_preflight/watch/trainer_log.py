"""LLaMA-Factory's own log file takes a fixed set of figures; this adds those of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


PREFIXES = ("gpu_mem_", "host_mem_")


def attach(callbacks: Iterable[Any]) -> None:
    """Lets the one of LLaMA-Factory's callbacks that writes trainer_log.jsonl write memory as well."""
    for callback in callbacks:
        if hasattr(callback, "_write_log"):
            callback.on_log = functools.partial(_on_log, callback, callback.on_log, callback._write_log)


def _on_log(
    callback: Any,
    original: Callable[..., Any],
    write: Callable[..., None],
    args: Any,
    state: Any,
    *others: Any,
    **named: Any,
) -> Any:
    logged = state.log_history[-1] if state.log_history else {}
    memory = {name: value for name, value in logged.items() if name.startswith(PREFIXES)}
    # `original` hands `_write_log` to another thread before it returns, where the next log may come first.
    callback._write_log = functools.partial(_write, write, memory)
    return original(args, state, *others, **named)


def _write(write: Callable[..., None], memory: dict[str, float], output_dir: str, logs: dict[str, Any]) -> None:
    write(output_dir, logs | memory)
