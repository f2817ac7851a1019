"""The images of a batch as a vision model gets them, on the simulated card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from llamafactory_preflight.simulate import values
from llamafactory_preflight.simulate.card import CARD


POSITION_ROWS = 4  # LLaMA-Factory's collator puts one of text before time, height and width


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """The images of one sample.

    Attributes:
        grids: Height and width of each in patches.
        patch_numel: Elements of a patch.
        merged: Patches that become one token.
        token_id: Stands in the text for each of their tokens.
    """

    grids: Sequence[tuple[int, int]]
    patch_numel: int
    merged: int
    token_id: int

    @classmethod
    def of(cls, config: Any, patches: Sequence[int]) -> Pictures:
        """Images of so many patches each, as nearly square as they can be.

        Args:
            config: The transformers config of a vision model of the Qwen family.
            patches: Patches of every image; multiples of what is merged.
        """
        vision = config.vision_config
        side = vision.spatial_merge_size
        channels = vision.in_chans if hasattr(vision, "in_chans") else vision.in_channels
        return cls(
            grids=[_grid(number, side) for number in patches],
            patch_numel=channels * vision.temporal_patch_size * vision.patch_size**2,
            merged=side**2,
            token_id=config.image_token_id,
        )

    def inputs(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """What they add to a batch of `rows` samples of `length` tokens, or replace in it."""
        patches = sum(height * width for height, width in self.grids)
        with no_dispatch():
            sizes = torch.tensor([(1, *grid) for grid in self.grids] * rows)
            ids = torch.zeros((rows, length), dtype=torch.int64)
            ids[:, : patches // self.merged] = self.token_id
        return {
            "input_ids": values.give(_empty(ids.shape, torch.int64), ids),
            "image_grid_thw": values.give(_empty(sizes.shape, torch.int64), sizes),
            "pixel_values": _empty((rows * patches, self.patch_numel), torch.float32),
            "position_ids": _empty((POSITION_ROWS, rows, length), torch.int64),
        }


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=CARD)


def _grid(patches: int, side: int) -> tuple[int, int]:
    tokens = patches // side**2
    height = next(number for number in range(math.isqrt(tokens), 0, -1) if tokens % number == 0)
    return height * side, tokens // height * side
