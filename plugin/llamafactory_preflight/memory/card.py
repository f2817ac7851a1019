"""The card an estimate is made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the estimate depends on of the card and its allocator.

    Attributes:
        compute_capability: Decides the size of cuBLAS' workspaces.
        expandable_segments: Whether PYTORCH_CUDA_ALLOC_CONF asks for them.
    """

    compute_capability: tuple[int, int] = (8, 0)
    expandable_segments: bool = True


def cublas_workspace(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace; the forward's and the backward's thread have one each.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    return 32 * 2**20 if compute_capability[0] in (9, 10) else 4096 * 2 * 1024 + 16 * 8 * 1024
