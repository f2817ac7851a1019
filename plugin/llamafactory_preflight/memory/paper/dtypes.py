"""Element types: a number whose low bits are the bytes an element takes, so that equal sizes stay different types."""

from __future__ import annotations


INT8 = 1
BOOL = 1 | 16
BFLOAT16 = 2
FLOAT16 = 2 | 8
FLOAT32 = 4
INT64 = 32

_NAMES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}


def size(dtype: int) -> int:
    """Bytes an element."""
    return 8 if dtype == INT64 else dtype & 7


def promote(a: int, b: int) -> int:
    """torch.promote_types of two floating types."""
    if a == b:
        return a
    return FLOAT32 if size(a) == size(b) else max(a, b, key=size)


def named(name: str) -> int:
    """The type that config.json's `torch_dtype` names; float32 where it is none of the three."""
    return _NAMES.get(name.removeprefix("torch."), FLOAT32)
