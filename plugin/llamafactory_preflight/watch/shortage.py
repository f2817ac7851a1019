"""Recognizes that memory ran out, and the errors that are mistaken for it, by what the libraries say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import parse_memory


GPU_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "HIP out of memory",
)
HOST_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "Unable to allocate")
PINNED_WORDS = ("cudaHostAlloc", "cudaHostRegister", "pin_memory", "pin memory")
# Functions of a traceback by what was going on; the innermost one that is known decides.
FUNCTIONS = {
    "get_dataset": "data",
    "load_model": "load",
    "evaluation_loop": "evaluate",
    "evaluate": "evaluate",
    "predict": "evaluate",
    "_save_checkpoint": "save",
    "save_model": "save",
    "_save": "save",
    "on_save": "save",
    "training_step": "forward_backward",
}
OPTIMIZER_FILES = ("/torch/optim/", "/bitsandbytes/optim/", "/accelerate/optimizer.py", "/ops/adam/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """What ran out, as far as the message tells; amounts in bytes.

    Attributes:
        where: `gpu`, `host`, or `pinned` for page-locked main memory.
        asked: What was asked for.
        free: What the card had free.
        total: What the card has in all.
        allowed: What this process was allowed to take of it.
        own: What this process had of the card.
        allocated: What of it lay in tensors.
        idle: What the allocator held without using it.
        others: Other processes on the card, by identifier.
    """

    where: Literal["gpu", "host", "pinned"]
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    allowed: int | None = None
    own: int | None = None
    allocated: int | None = None
    idle: int | None = None
    others: tuple[tuple[int, int], ...] = ()


def recognized(error: BaseException) -> Shortage | None:
    """What ran out, or None where the error is another."""
    text = said(error)
    if any(words in text for words in PINNED_WORDS) and any(words in text for words in (*GPU_WORDS, *HOST_WORDS)):
        return Shortage(where="pinned", asked=_host_asked(text))
    if any(words in text for words in GPU_WORDS):
        return _on_gpu(text)
    no_memory = isinstance(error, OSError) and error.errno == 12
    if isinstance(error, MemoryError) or no_memory or any(words in text for words in HOST_WORDS):
        return Shortage(where="host", asked=_host_asked(text))
    return None


def said(error: BaseException) -> str:
    """The texts of an error and of those that led to it."""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(texts) < 8:
        texts.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return "\n".join(texts)


def phase_of(error: BaseException, otherwise: str) -> str:
    """What was going on by the error's traceback, or `otherwise` where it does not show."""
    found = otherwise
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found = FUNCTIONS.get(code.co_name, found)
        if code.co_name == "step" and any(part in code.co_filename for part in OPTIMIZER_FILES):
            found = "optimizer_step"
        trace = trace.tb_next
    return found


def _on_gpu(text: str) -> Shortage:
    amount = r"(\d+(?:\.\d+)? ?[KMGT]?i?B|\d+ bytes)"
    others = re.findall(rf"Process (\d+) has {amount} memory in use", text)
    return Shortage(
        where="gpu",
        asked=_amount(text, rf"Tried to allocate {amount}"),
        free=_amount(text, rf"of which {amount} is free"),
        total=_amount(text, rf"total capacity of {amount}"),
        allowed=_amount(text, rf"{amount} allowed"),
        own=_amount(text, rf"this process has {amount} memory in use"),
        allocated=_amount(text, rf"{amount} is allocated by PyTorch"),
        idle=_amount(text, rf"{amount} is reserved by PyTorch but unallocated"),
        others=tuple((int(pid), _bytes(taken) or 0) for pid, taken in others),
    )


def _host_asked(text: str) -> int | None:
    return _amount(text, r"tried to allocate (\d+ bytes)") or _amount(text, r"Unable to allocate ([\d.]+ [KMGT]iB)")


def _amount(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return _bytes(match.group(1)) if match else None


def _bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    if unit == "bytes":
        return int(number)
    if unit == "KiB":
        return int(float(number) * 1024)
    try:
        return parse_memory(text)
    except UserError:
        return None
