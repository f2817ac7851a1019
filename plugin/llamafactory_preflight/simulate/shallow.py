"""Shallow versions of a model, and the step from two of them to the real depth."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate.storage import Peak


_PATTERNS = ("sliding_window_pattern", "full_attention_interval", "decoder_sparse_step", "interleave_moe_layer_step")
_PER_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """Two depths to simulate, and how many layers at the front and at the back are watched one by one."""

    small: int
    large: int
    front: int
    back: int
    real: int


def read(config: Mapping[str, Any]) -> Any:
    """Returns config.json as a transformers config.

    Raises:
        Unmodelled: The installed transformers has no such model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    values = dict(config)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise Unmodelled(f"transformers {__version__} has no model type `{model_type}`")
    return AutoConfig.for_model(model_type, **values)


def stacked_layers(config: Any) -> int:
    """First layers to which a vision tower adds features (DeepStack)."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def choose(config: Any, run: RunDescription, *, stacked: int = 0) -> Depths:
    """Picks depths that differ by one period of the layer pattern and are congruent to the real depth.

    Freezing all but some layers makes those a pattern of their own, which has to fit in as a whole; so do `stacked`
    layers that get images.
    """
    text = config.get_text_config()
    real = text.num_hidden_layers
    period = _period(text)
    trained = run.freeze_trainable_layers if run.finetuning_type == "freeze" else 0
    small = abs(trained) + max(period, 2, stacked + 1)
    small += (real - small) % period
    if small + period >= real:
        return Depths(small=real, large=real, front=real, back=0, real=real)
    others = small - abs(trained)
    front = others // 2 - min(trained, 0)
    return Depths(small=small, large=small + period, front=front, back=small - front, real=real)


def _period(text: Any) -> int:
    """The shortest pattern that the per-layer lists of a config repeat."""
    period = 1
    for name in _PER_LAYER_LISTS:
        values = getattr(text, name, None)
        if values:
            period = max(period, next(p for p in range(1, len(values) + 1) if values[p:] == values[:-p]))
    return max([period, *(getattr(text, name, None) or 1 for name in _PATTERNS)])


def with_depth(config: Any, depth: int) -> Any:
    """Returns a copy of a transformers config with its first `depth` decoder layers."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    text.num_hidden_layers = depth
    for name in _PER_LAYER_LISTS:
        if getattr(text, name, None):
            setattr(text, name, list(getattr(text, name))[:depth])
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = [index for index in text.mlp_only_layers if index < depth]
    return shallow


def extrapolate(small: Mapping[str, Peak], large: Mapping[str, Peak], depths: Depths) -> dict[str, Peak]:
    """Continues every stretch's peak and components along the line through two depths.

    A middle layer's peak lies between those of the ends, because the position of a layer shifts bytes linearly too.
    """
    if depths.small == depths.large:
        return dict(small)
    steps = (depths.real - depths.small) // (depths.large - depths.small)
    found = {}
    for name in small.keys() & large.keys():
        if name.endswith("/layers between"):
            continue
        before, after = small[name].components, large[name].components
        components = {
            part: before.get(part, 0) + steps * (after.get(part, 0) - before.get(part, 0))
            for part in before.keys() | after.keys()
        }
        found[name] = Peak(num_bytes=sum(components.values()), components=components)
    return found
