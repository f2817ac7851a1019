"""What `measure_runs.py` needs for models that see: their processor's files, and data sets with images.

A case with `"images": [[width, height], ...]` trains on samples that have an image of each of these sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


WORDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""The field of config.json that names each of the tokens around images."""
PROCESSORS = {
    "qwen3_vl": ("Qwen3VL", "Qwen3VL"),
    "qwen3_vl_moe": ("Qwen3VL", "Qwen3VL"),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VL"),
    "qwen2_vl": ("Qwen2VL", "Qwen2VL"),
}
"""What the classes of a model type are called: its processor, and what that scales images and videos with."""
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {"patch_size": 16, "size": {"shortest_edge": 256**2, "longest_edge": 4096**2}},
    "Qwen2VL": {"patch_size": 14, "size": {"shortest_edge": 56**2, "longest_edge": 16384 * 28**2}},
}
"""Sizes in the published preprocessor_config.json files."""


def patches(config: dict[str, Any], width: int, height: int, *, max_pixels: int = 768**2) -> int:
    """Patches that a model gets of an image: LLaMA-Factory scales it, then the processor rounds it to whole tokens."""
    sizes = SIZES[PROCESSORS[config["model_type"]][1]]
    factor = 2 * sizes["patch_size"]
    if width * height > max_pixels:
        scale = math.sqrt(max_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    sides = [round(side / factor) * factor for side in (width, height)]
    for bound, cut, crossed in (("longest_edge", math.floor, 1), ("shortest_edge", math.ceil, -1)):
        if crossed * math.prod(sides) > crossed * sizes["size"][bound]:
            scale = math.sqrt(sizes["size"][bound] / (width * height))
            sides = [cut(side * scale / factor) * factor for side in (width, height)]
    return int(math.prod(sides) // sizes["patch_size"] ** 2)


def sees(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a vision model."""
    return "vision_config" in config


def write_processor(folder: Path, config: dict[str, Any], tokenizer: Any) -> None:
    """Writes the files of the processor and a tokenizer that knows `WORDS`, with its ids in config.json."""
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": list(WORDS.values())})
    kind, generation = PROCESSORS[config["model_type"]]
    processor = getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**SIZES[generation]),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{generation}VideoProcessor")(**SIZES[generation]),
    )
    processor.save_pretrained(folder)
    ids = {field: tokenizer.convert_tokens_to_ids(word) for field, word in WORDS.items()}
    (folder / "config.json").write_text(json.dumps(config | ids))


def write_images(folder: Path, sizes: Sequence[Sequence[int]]) -> list[str]:
    """Writes a blank image of each size and returns the files."""
    from PIL import Image

    files = []
    for width, height in sizes:
        file = folder / f"{width}x{height}.png"
        Image.new("RGB", (width, height), (200, 120, 40)).save(file)
        files.append(str(file))
    return files
