"""The vision side of a multimodal model: the frozen weights it brings, and what it adds to a batch of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionLinear:
    """`count` linear layers of one size, with a bias each."""

    in_features: int
    out_features: int
    count: int

    @property
    def numel(self) -> int:
        """Elements of one weight matrix."""
        return self.in_features * self.out_features


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """A vision tower of the Qwen family, as far as its activations depend on it.

    Attributes:
        hidden_size: Features of a patch.
        width: Features inside the MLP.
        depth: Blocks.
        num_heads: Attention heads.
        out_size: Features of a token for the language model.
        patch_size: Pixels along a side of a patch.
        patch_numel: Elements of a patch in the processor's output: all channels of the frames that it covers.
        merge_size: Patches along a side that become one token.
        num_stacked: Blocks whose output goes to the first layers of the language model as well (DeepStack).
        window: Patches along a side of an attention window, or None where every block looks at whole images.
        num_full_attention_blocks: Blocks without a window.
        rms_norm: RMSNorms in elementary operations, not LayerNorms.
        gated: A gated MLP.
        quick_gelu: An activation function in elementary operations.
        requires_grad: `enable_input_require_grads` of transformers 5 finds the patch embedding too, so that under LoRA
            with checkpointing the frozen tower keeps everything for a backward.
    """

    hidden_size: int
    width: int
    depth: int
    num_heads: int
    out_size: int
    patch_size: int
    patch_numel: int
    merge_size: int
    num_stacked: int = 0
    window: int | None = None
    num_full_attention_blocks: int = 0
    rms_norm: bool = False
    gated: bool = False
    quick_gelu: bool = False
    requires_grad: bool = True

    @property
    def merged(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Features in and out of one linear layer of each kind; `gate` only where the MLP is gated."""
        size, merged = self.hidden_size, self.hidden_size * self.merged
        gate = {"gate": (size, self.width)} if self.gated else {}
        inner = {"qkv": (size, 3 * size), "proj": (size, size), "up": (size, self.width), "down": (self.width, size)}
        return inner | gate | {"merge": (merged, merged), "out": (merged, self.out_size)}


MARKS = 2
"""Tokens around the image tokens: start and end of vision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """Vision tower and projector.

    Attributes:
        linears: The linear layers, which quantization changes.
        other: Elements of everything else.
        templates: LLaMA-Factory's templates that know the model's images.
        dummy_tokens: Tokens of the blank image that LLaMA-Factory's collator adds to a batch without images.
        tower: What images go through, or None where that has no formula.
    """

    linears: tuple[VisionLinear, ...]
    other: int
    templates: frozenset[str]
    dummy_tokens: int
    tower: TowerShape | None = None

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        return self.other + sum(linear.count * (linear.numel + linear.out_features) for linear in self.linears)


def qwen3_vl(vision: Mapping[str, Any], hidden_size: int) -> VisionShape:
    """Qwen3-VL: blocks with one qkv projection and LayerNorms, a merger, and one more for each deep-stacked layer."""
    size, depth = vision.get("hidden_size", 1152), vision.get("depth", 27)
    width = vision.get("intermediate_size", 4304)
    patch, frames = vision.get("patch_size", 16), vision.get("temporal_patch_size", 2)
    merged = size * vision.get("spatial_merge_size", 2) ** 2
    stacked = len(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    out = vision.get("out_hidden_size", hidden_size)
    return VisionShape(
        linears=(
            *_blocks(depth, (size, 3 * size), (size, size), (size, width), (width, size)),
            *_blocks(1 + stacked, (merged, merged), (merged, out)),
        ),
        other=(
            size * (vision.get("in_channels", 3) * frames * patch**2 + 1)
            + size * vision.get("num_position_embeddings", 2304)
            + depth * 4 * size
            + 2 * size
            + stacked * 2 * merged
        ),
        templates=frozenset({"qwen3_vl", "qwen3_vl_nothink"}),
        dummy_tokens=66,
        tower=replace(
            _tower(vision, size=size, depth=depth, width=width, patch=patch, frames=frames, out=out),
            num_stacked=stacked,
            requires_grad=False,
        ),
    )


def qwen2_5_vl(vision: Mapping[str, Any], hidden_size: int) -> VisionShape:
    """Qwen2.5-VL: as Qwen3-VL's, with a gated MLP, RMSNorms and one merger."""
    size, depth = vision.get("hidden_size", 1280), vision.get("depth", 32)
    width = vision.get("intermediate_size", 3420)
    patch, frames = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
    merged = size * vision.get("spatial_merge_size", 2) ** 2
    out = vision.get("out_hidden_size", hidden_size)
    return VisionShape(
        linears=(
            *_blocks(depth, (size, 3 * size), (size, size), (size, width), (size, width), (width, size)),
            *_blocks(1, (merged, merged), (merged, out)),
        ),
        other=size * vision.get("in_channels", 3) * frames * patch**2 + depth * 2 * size + size,
        templates=frozenset({"qwen2_vl"}),
        dummy_tokens=6,
        tower=replace(
            _tower(vision, size=size, depth=depth, width=width, patch=patch, frames=frames, out=out),
            window=vision.get("window_size", 112) // patch,
            num_full_attention_blocks=len(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            rms_norm=True,
            gated=True,
        ),
    )


def qwen2_vl(vision: Mapping[str, Any], hidden_size: int) -> VisionShape:
    """Qwen2-VL: as Qwen2.5-VL's, with a plain MLP and LayerNorms."""
    size, depth = vision.get("embed_dim", 1280), vision.get("depth", 32)
    width = size * vision.get("mlp_ratio", 4)
    patch, frames = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
    merged = size * vision.get("spatial_merge_size", 2) ** 2
    return VisionShape(
        linears=(
            *_blocks(depth, (size, 3 * size), (size, size), (size, width), (width, size)),
            *_blocks(1, (merged, merged), (merged, vision.get("hidden_size", hidden_size))),
        ),
        other=size * vision.get("in_channels", 3) * frames * patch**2 + depth * 4 * size + 2 * size,
        templates=frozenset({"qwen2_vl"}),
        dummy_tokens=6,
        tower=replace(
            _tower(
                vision,
                size=size,
                depth=depth,
                width=width,
                patch=patch,
                frames=frames,
                out=vision.get("hidden_size", hidden_size),
            ),
            quick_gelu=vision.get("hidden_act", "quick_gelu") == "quick_gelu",
        ),
    )


def gemma3(vision: Mapping[str, Any], hidden_size: int) -> VisionShape:
    """SigLIP and Gemma's projector, a bare matrix with a norm."""
    size, depth = vision.get("hidden_size", 1152), vision.get("num_hidden_layers", 27)
    width = vision.get("intermediate_size", 4304)
    patch, image = vision.get("patch_size", 14), vision.get("image_size", 896)
    return VisionShape(
        linears=_blocks(depth, (size, size), (size, size), (size, size), (size, size), (size, width), (width, size)),
        other=(
            size * (vision.get("num_channels", 3) * patch**2 + 1)
            + size * (image // patch) ** 2
            + (depth * 2 + 1) * 2 * size
            + size * hidden_size
            + size
        ),
        templates=frozenset({"gemma3"}),
        dummy_tokens=260,
    )


def _tower(
    vision: Mapping[str, Any], *, size: int, depth: int, width: int, patch: int, frames: int, out: int
) -> TowerShape:
    """What the towers of Qwen's vision models have in common."""
    return TowerShape(
        hidden_size=size,
        width=width,
        depth=depth,
        num_heads=vision.get("num_heads", 16),
        out_size=out,
        patch_size=patch,
        patch_numel=vision.get("in_channels", 3) * frames * patch**2,
        merge_size=vision.get("spatial_merge_size", 2),
    )


def _blocks(count: int, *sizes: tuple[int, int]) -> tuple[VisionLinear, ...]:
    return tuple(VisionLinear(in_features=a, out_features=b, count=count) for a, b in sizes)


VISION_SHAPES: Mapping[str, Callable[[Mapping[str, Any], int], VisionShape]] = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
}
"""Model types with a vision tower, after transformers' modelling files."""
