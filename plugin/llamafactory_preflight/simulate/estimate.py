"""`--exact`: the estimate of a run by simulation instead of by formula."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llamafactory_preflight.data.images import Images
from llamafactory_preflight.errors import Unmodelled, words
from llamafactory_preflight.memory.card import Card
from llamafactory_preflight.memory.host import host_bytes, host_remarks
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.result import PHASES, MemoryEstimate, bounds
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


if TYPE_CHECKING:
    from llamafactory_preflight.simulate.storage import Peak

TRAINING_PHASES = ("load", "forward_backward", "optimizer_step")
NEEDED = ("torch", "transformers", "peft", "accelerate", "llamafactory")
NOT_FOLLOWED = (
    *("deepspeed", "fsdp", "use_mca", "use_hyper_parallel"),
    *("use_unsloth", "use_kt", "fp8", "torch_compile", "use_v1_kernels", "mixture_of_depths", "shift_attn"),
    *("export_dir", "adapter_name_or_path", "train_from_scratch", "resize_vocab", "use_llama_pro", "use_badam"),
    *("use_dft_loss", "use_asft_loss", "use_eaft_loss", "label_smoothing_factor", "predict_with_generate"),
)
FLOAT32_BYTES = 4
LONGEST_REASON = 300  # characters of what a library says when it fails


def estimate(
    run: RunDescription,
    config: Mapping[str, Any],
    *,
    software: Software,
    card: Card | None = None,
    length: int | None = None,
    images: Images | None = None,
) -> MemoryEstimate:
    """Simulates a run on a card that exists on paper only.

    Args:
        run: The run.
        config: The model's config.json.
        software: Installed versions; the simulation runs these packages.
        card: The card; by default an Ampere one with expandable segments.
        length: Tokens of the longest sample, if it is known to be shorter than the cutoff.
        images: The images of a sample, or None for text.

    Raises:
        Unmodelled: The run takes a path that the simulated loop does not follow, or a package is missing.
    """
    _refuse_other_loops(run, config, images)
    missing = [name for name in NEEDED if getattr(software, name) is None]
    if missing:
        raise Unmodelled(f"A simulation runs the real packages, and these are not installed: {', '.join(missing)}")
    from llamafactory_preflight.simulate import shallow
    from llamafactory_preflight.simulate.loop import sequence_length
    from llamafactory_preflight.simulate.model import loaded_type
    from llamafactory_preflight.simulate.replay import Recordings
    from llamafactory_preflight.simulate.trace import trace

    if length is not None and not run.packing and not run.neat_packing:
        run = dataclasses.replace(run, cutoff_len=min(run.cutoff_len, length))
    card = card or Card()
    with _quiet(), _anything_else_is_unknown():
        full = shallow.read(config)
        patches = images.patches if images is not None else ()
        depths = shallow.choose(full, run, stacked=shallow.stacked_layers(full) if patches else 0)
        recordings: Recordings = {}
        small, large = (
            trace(
                run,
                shallow.with_depth(full, depth),
                card=card,
                front=depths.front,
                back=depths.back,
                patches=patches,
                recordings=recordings,
            ).peaks()
            for depth in (depths.small, depths.large)
        )
    stretches = shallow.extrapolate(small, large, depths)
    fullest = {phase: _fullest(stretches, phase) for phase in PHASES}
    name = max(TRAINING_PHASES, key=lambda phase: stretches[fullest[phase]].num_bytes)
    peak = stretches[fullest[name]]
    tokens = sequence_length(run) * run.per_device_train_batch_size
    depth = f"Simulated with {depths.small} and {depths.large} of {depths.real} layers"
    return bounds(
        phases={phase: stretches[key].num_bytes if key else 0 for phase, key in fullest.items()},
        components=peak.components,
        exact=True,
        card=card,
        host=_host_bytes(run, full, stretches, item=loaded_type(full).itemsize, tokens=tokens, peak=peak.num_bytes),
        tokens=tokens * run.gradient_accumulation_steps,
        remarks=(f"{depth}; the peak is in {fullest[name]}.", *_remarks(config, images), *host_remarks(run)),
    )


def _host_bytes(
    run: RunDescription, config: Any, stretches: Mapping[str, Peak], *, item: int, tokens: int, peak: int
) -> int:
    """Main memory, by the formula's rule."""
    text = config.get_text_config()
    stepping = stretches[_fullest(stretches, "optimizer_step")].components
    trained = stepping.get("gradients", 0)
    keeps = run.pure_bf16 and run.finetuning_type not in ADAPTERS
    return host_bytes(
        run,
        trained=trained,
        num_trained=trained // (item if keeps else FLOAT32_BYTES),
        weights=stepping["weights"],
        inputs=text.num_hidden_layers * tokens * text.hidden_size * item,
        peak=peak,
    )


def _remarks(config: Mapping[str, Any], images: Images | None) -> Iterator[str]:
    if images is not None:
        yield images.reason
    elif "vision_config" in config:
        yield "This is for text alone: images add their tokens and the vision tower's activations."


def _fullest(stretches: Mapping[str, Peak], phase: str) -> str:
    names = [name for name in stretches if name.split("/")[0] == phase]
    return max(names, key=lambda name: stretches[name].num_bytes, default="")


def _refuse_other_loops(run: RunDescription, config: Mapping[str, Any], images: Images | None) -> None:
    if images is not None and run.packing:
        raise Unmodelled("The simulation does not follow packed samples with images")
    if run.stage not in ("pt", "sft"):
        raise Unmodelled(f"The simulation does not follow the loop of stage `{run.stage}`")
    for name in (*(name for name in NOT_FOLLOWED if getattr(run, name)), *run.unmodelled):
        raise Unmodelled(f"The simulation does not follow `{name}`")
    if run.quantization_bit is not None and run.quantization_method not in ("bnb", "bitsandbytes"):
        raise Unmodelled(f"The simulation does not follow the kernels of `{run.quantization_method}`")
    if config.get("quantization_config"):
        raise Unmodelled("The simulation does not follow weights that come quantized")


@contextmanager
def _anything_else_is_unknown() -> Iterator[None]:
    """Turns what LLaMA-Factory refuses, and what fake tensors cannot do, into an unknown verdict."""
    try:
        yield
    except Unmodelled:
        raise
    except Exception as error:
        line = words(error)[:LONGEST_REASON]
        raise Unmodelled(f"The simulated run fails with {type(error).__name__}: {line}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the libraries' remarks on a run that is only simulated from the user."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)
