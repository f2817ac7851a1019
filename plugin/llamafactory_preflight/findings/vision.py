"""Images: how large they were taken to be, and what the vision tower keeps of them."""

from __future__ import annotations

from collections.abc import Iterator

from llamafactory_preflight import memory
from llamafactory_preflight.data.images import Images
from llamafactory_preflight.result import Finding, Result


def images(result: Result, pictures: Images | None) -> Iterator[Finding]:
    """What a prediction with images rests on."""
    if pictures is None or result.estimate is None:
        return
    yield Finding(id="images", severity="info", message=pictures.reason)
    if result.shape is not None and memory.keeps_tower(result.run, result.shape):
        message = (
            "The frozen vision tower keeps its activations until the backward: with transformers 5, adapters under "
            "gradient checkpointing let its input require a gradient, and layers without anything to train are not "
            "checkpointed. Smaller images (image_max_pixels) take less."
        )
        yield Finding(id="vision-tower-kept", severity="info", message=message)
