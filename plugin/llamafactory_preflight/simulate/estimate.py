"""`--exact`: the estimate of a run by simulation instead of by formula."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory.estimate import COMPONENTS, PHASES, MemoryEstimate
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software

UNCERTAINTY = 0.01  # of the peak, either way; see tests/test_simulate.py for the measured errors
CUBLAS_WORKSPACE = 32 * 1024**2  # bytes a thread on Hopper, taken through PyTorch's allocator (`getChosenWorkspaceSize`)


def estimate(run: RunDescription, config: Mapping[str, Any], *, software: Software) -> MemoryEstimate:
    """Simulates a run on a card that exists on paper only.

    Args:
        run: The run.
        config: The model's config.json.
        software: Versions, which say whether the installed libraries are the ones that will run.

    Raises:
        Unmodelled: The run takes a path that the simulated loop does not follow.
    """
    from transformers import AutoConfig

    from llamafactory_preflight.simulate import shallow
    from llamafactory_preflight.simulate.loop import sequence_length

    _refuse_other_loops(run)
    kind = dict(config)
    full = AutoConfig.for_model(kind.pop("model_type"), **kind)
    depths = shallow.choose(full, run)
    with _quiet():
        small = simulate(run, shallow.with_depth(full, depths.small), ends=depths.ends)
        large = small if depths.large == depths.small else simulate(run, shallow.with_depth(full, depths.large), ends=depths.ends)
    stretches = shallow.extrapolate(small, large, depths)
    fullest = {phase: _fullest(stretches, phase) for phase in PHASES}
    name = max(("load", "forward_backward", "optimizer_step"), key=lambda phase: stretches[fullest[phase]].num_bytes if fullest[phase] else 0)
    peak = stretches[fullest[name]]
    return MemoryEstimate(
        phases={phase: stretches[key].num_bytes if key else 0 for phase, key in fullest.items()},
        components={part: peak.components.get(part, 0) for part in COMPONENTS},
        peak_allocated_bytes=peak.num_bytes,
        low_bytes=round(peak.num_bytes * (1 - UNCERTAINTY)),
        high_bytes=round(peak.num_bytes * (1 + UNCERTAINTY)),
        slack_bytes=0,
        host_bytes=0,
        tokens_per_step=sequence_length(run) * run.per_device_train_batch_size * run.gradient_accumulation_steps,
        reasons=(
            f"simulated with {depths.small} and {depths.large} of {depths.real} layers; the peak is in {fullest[name]}",
        ),
    )


def _fullest(stretches: Mapping[str, Any], phase: str) -> str:
    keys = [key for key in stretches if key.split("/")[0] == phase]
    return max(keys, key=lambda key: stretches[key].num_bytes, default="")


def _refuse_other_loops(run: RunDescription) -> None:
    if run.stage not in ("pt", "sft"):
        raise Unmodelled(f"the simulation does not follow the loop of stage `{run.stage}`")
    for name in ("deepspeed", "fsdp", "use_unsloth", "use_kt", "fp8", "use_mca", "use_hyper_parallel", "torch_compile", "use_badam"):
        if getattr(run, name):
            raise Unmodelled(f"the simulation does not follow `{name}`")
    if run.adapter_name_or_path:
        raise Unmodelled("the simulation does not load adapters")


def simulate(run: RunDescription, config: Any, *, ends: int) -> Mapping[str, Any]:
    """Simulates loading, two optimizer steps and an evaluation batch; returns the peak of every stretch."""
    return trace(run, config, ends=ends).peaks()


def trace(run: RunDescription, config: Any, *, ends: int) -> Any:
    """As `simulate`, but returns the tracker with its whole log."""
    import torch

    from llamafactory_preflight.simulate import autocast, card, kernels, liger, loop, model, optimizer
    from llamafactory_preflight.simulate.arguments import model_arguments
    from llamafactory_preflight.simulate.storage import StorageTracker

    text = config.get_text_config()
    casting = autocast.CudaAutocast()
    with ExitStack() as stack:
        if run.enable_liger_kernel:
            stack.enter_context(liger.launches_left_out(config.model_type))
            _apply_liger(run, config)
        network, _ = model.skeleton(config, model_arguments(run))
        tracker = StorageTracker(vocab_size=text.vocab_size, replacements=kernels.replacements())
        for context in (card.cuda_properties(), kernels.cuda_kernels(casting), optimizer.on_paper(run), card.CardMode(), tracker, casting):
            stack.enter_context(context)
        tracker.stretch("load/load")
        tracker.allocating("weights")
        model.put_on_card(network)
        tracker.allocating("adapters" if run.finetuning_type in ("lora", "oft") else "weights")
        network = model.prepare(network, config, run)
        tracker.stretch("load/ready")
        tracker.stretch("forward_backward/start")
        tracker.allocating("buffers")
        workspaces = [torch.empty(CUBLAS_WORKSPACE, dtype=torch.uint8, device=card.CARD) for _ in range(2)]
        tracker.allocating("activations")
        loop.wrap_forward(network, run)
        steps = optimizer.build(network, run)
        layers = model.decoder_layers(network, text.num_hidden_layers)
        stack.enter_context(loop.watched_layers(layers, tracker, ends=ends))
        loop.train(network, steps, run, tracker)
        if run.do_eval or run.eval_strategy != "no":
            loop.evaluate(network, run, tracker)
        tracker.stretch("end/end")
        del workspaces
    return tracker


def _apply_liger(run: RunDescription, config: Any) -> None:
    from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel

    from llamafactory_preflight.simulate.arguments import model_arguments

    apply_liger_kernel(config, model_arguments(run), is_trainable=True, require_logits=run.stage not in ("pt", "sft"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the libraries' remarks on a run that is only simulated from the user."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)
