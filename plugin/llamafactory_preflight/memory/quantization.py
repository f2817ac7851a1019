"""How the base weights of a run are quantized, and what a quantized matrix takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT16, FLOAT32
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


QUANTIZATION_BLOCK = 64
"""Weights that share one absmax in bitsandbytes' 4 bit, and one scale in HQQ."""
NESTED_BLOCK = 256
"""Absmax values that share one of their own under double quantization."""
TABLE_BYTES = 2560
"""Code tables and offset that every 4-bit tensor carries, each rounded up to 512 bytes."""
GROUP_SIZE = 128
"""Weights that share a scale and a zero point in GPTQ and AWQ checkpoints that do not say."""
BROUGHT_BACK = ("fp8", "mxfp4")
"""Checkpoints that LLaMA-Factory has transformers turn into 16 bit as they load."""
BY_SIZE = ("gptq", "awq", "hqq", "eetq")
"""Methods whose weights are counted but whose kernels were not looked into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A method, its bits, whether its scales are quantized once more, and how many weights share one."""

    method: str
    bits: int
    double: bool = False
    group_size: int = QUANTIZATION_BLOCK

    @property
    def exact(self) -> bool:
        """Whether kernels and sizes were measured."""
        return self.method not in BY_SIZE


def quantization(run: RunDescription, shape: ModelShape) -> Quantized | None:
    """What the checkpoint brings goes before what the arguments ask for (LLaMA-Factory, model_utils/quantization.py).

    Raises:
        Unmodelled: Another method or width.
    """
    if shape.quantization_method in BROUGHT_BACK:
        return None
    if shape.quantization_method is None:
        if run.quantization_bit is None:
            return None
        found = Quantized(method=run.quantization_method, bits=run.quantization_bit, double=run.double_quantization)
    else:
        method = "bnb" if shape.quantization_method == "bitsandbytes" else shape.quantization_method
        found = Quantized(
            method=method,
            bits=shape.quantization_bits or 0,
            double=shape.double_quantization,
            group_size=shape.quantization_group_size or (QUANTIZATION_BLOCK if method == "bnb" else GROUP_SIZE),
        )
    known = {"bnb": (4, 8), "gptq": (2, 3, 4, 8), "awq": (4,), "hqq": (1, 2, 3, 4, 8), "eetq": (8,)}
    if found.bits not in known.get(found.method, ()):
        raise Unmodelled(
            phrase("Quantization by {method} to {bits} bit has no formula yet", method=found.method, bits=found.bits)
            if found.bits
            else phrase("Quantization by {method} has no formula yet", method=found.method)
        )
    return found


def weight_bytes(kind: Quantized, numel: int, rows: int, block: Callable[[int], int]) -> int:
    """Bytes of one matrix of `rows` rows, statistics included."""
    if kind.method == "eetq" or (kind.method == "bnb" and kind.bits == 8):
        return block(numel) + block(rows * dtypes.size(FLOAT32))
    packed, groups = block(numel * kind.bits // 8), -(-numel // kind.group_size)
    if kind.method == "hqq":
        return packed + 2 * block(groups * dtypes.size(FLOAT16))
    if kind.method != "bnb":
        return packed + block(groups * dtypes.size(FLOAT16)) + block(groups * kind.bits // 8)
    if not kind.double:
        return packed + block(groups * dtypes.size(FLOAT32)) + TABLE_BYTES // 2
    return packed + block(groups) + block(groups // NESTED_BLOCK * dtypes.size(FLOAT32)) + TABLE_BYTES
