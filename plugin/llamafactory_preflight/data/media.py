"""The data sets of a run that bring images, videos or sound, and how many images a sample of theirs has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory_preflight.arguments import paths
from llamafactory_preflight.data import rows
from llamafactory_preflight.data.images import Counted, Source
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.shape import FAMILIES, ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


IMAGES = "images"
OTHERS = ("videos", "audios")


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What the data sets of a run bring beside text.

    Attributes:
        names: The data sets that bring anything, sorted.
        others: Those among them with videos or sound.
        num_images: Images of the sample that has most of them, or None where that cannot be told from here.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    num_images: int | None


def of(arguments: Mapping[str, Any]) -> Media | None:
    """Looks into `dataset_info.json`, and into data files that it names where they are local and not too large.

    Returns:
        What there is beside text, as far as the file tells, or None for text alone.
    """
    folder = arguments.get("dataset_dir", "data")
    known = paths.datasets_in(Path(folder)) if isinstance(folder, str) else {}
    entries = {name: known.get(name) for name in sorted(paths.dataset_names(arguments))}
    columns = {name: entry.get("columns") for name, entry in entries.items() if isinstance(entry, dict)}
    given = {name: column for name, column in columns.items() if isinstance(column, dict)}
    names = [name for name, column in given.items() if any(map(column.get, (IMAGES, *OTHERS)))]
    if not names:
        return None
    counts = [
        _most_images(Path(str(folder)), known[name].get("file_name"), given[name][IMAGES])
        for name in names
        if given[name].get(IMAGES)
    ]
    return Media(
        names=tuple(names),
        others=tuple(name for name in names if any(map(given[name].get, OTHERS))),
        num_images=None if None in counts else max((count for count in counts if count is not None), default=0),
    )


def source(
    arguments: Mapping[str, Any],
    run: RunDescription,
    config: Mapping[str, Any],
    count: Callable[[int], Counted | None] | None = None,
) -> Source | None:
    """Where the images of a run come from, or None where it trains on text.

    Args:
        arguments: As LLaMA-Factory gets them.
        run: The same as a description.
        config: The model's config.json.
        count: Counts images in the tokenized data, once there is some; it is given the image token.

    Raises:
        Unmodelled: There is something beside text that has no formula.
    """
    found = of(arguments) if "vision_config" in config and run.stage != "pt" else None
    if found is None or not (found.others or found.num_images != 0):
        return None
    if found.others:
        others = ", ".join(found.others)
        raise Unmodelled(phrase("What the videos or the sound of {names} take has no formula yet", names=others))
    vision = ModelShape.from_config(config).vision if config.get("model_type") in FAMILIES else None
    if vision is None or vision.tower is None:
        names = ", ".join(found.names)
        raise Unmodelled(phrase("What the images of {names} take has no formula yet", names=names))
    token = config.get("image_token_id")
    counted = count(token) if count is not None and isinstance(token, int) else None
    return Source(tower=vision.tower, count=found.num_images, counted=counted)


def _most_images(folder: Path, file_name: object, column: object) -> int | None:
    """Images of the sample that has most, or None where the data is not a JSON file of a moderate size."""
    if not isinstance(file_name, str):
        return None
    try:
        found = rows.read(folder / file_name)
        return max((_number(row.get(str(column))) for row in found if isinstance(row, dict)), default=0)
    except (OSError, ValueError, RecursionError):
        return None


def _number(images: object) -> int:
    """LLaMA-Factory takes a list of images, or a single one."""
    if isinstance(images, list):
        return len(images)
    return 1 if images else 0
