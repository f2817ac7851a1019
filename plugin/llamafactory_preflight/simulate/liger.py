"""Liger's own Python code with its Triton launches left out: its buffers are allocated, nothing is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate.arguments import model_arguments
from llamafactory_preflight.simulate.card import CARD
from llamafactory_preflight.simulate.model import auto_class


AUTOTUNE_BUFFER = 256 * 1024**2  # bytes (`get_empty_cache_for_benchmark` of Triton's NVIDIA driver)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def tunes_kernels(run: RunDescription, text: Any) -> bool:
    """Whether Triton tunes kernels in the first step: those of Liger's fused experts."""
    return run.enable_liger_kernel and any(getattr(text, name, None) for name in EXPERTS)


@contextmanager
def applied_without_launches(run: RunDescription, config: Any) -> Iterator[None]:
    """Applies Liger as LLaMA-Factory does, for fake tensors, and afterwards takes it off the model's classes.

    LLaMA-Factory patches the classes of the whole process, so the next simulation would have Liger too.
    """
    try:
        import triton
        from liger_kernel.transformers import monkey_patch  # noqa: F401
    except ImportError as error:
        raise Unmodelled(f"liger-kernel can only be simulated where it and triton are installed: {error}") from None
    from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel

    modeling = sys.modules[auto_class(config)._model_mapping[type(config)].__module__]
    functional = torch.nn.functional
    classes = {value: value.__dict__.get("forward") for value in vars(modeling).values() if isinstance(value, type)}
    names, cross_entropy = dict(vars(modeling)), functional.cross_entropy
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.jit.JITFunction, "run", lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(triton.runtime.autotuner.Autotuner, "run", _autotuned_launch(set())))
        stack.enter_context(mock.patch("torch.cuda.device", lambda *args: nullcontext()))
        try:
            needs_logits = run.stage not in ("pt", "sft")
            apply_liger_kernel(config, model_arguments(run), is_trainable=True, require_logits=needs_logits)
            yield
        finally:
            vars(modeling).update(names)
            functional.cross_entropy = cross_entropy
            for owner, forward in classes.items():
                _restore(owner, forward)


def _autotuned_launch(tuned: set[int]) -> Any:
    """A launch of a kernel that Triton tunes at its first call, with a buffer to flush the L2 cache in between."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if id(self) not in tuned:
            torch.empty(AUTOTUNE_BUFFER, dtype=torch.uint8, device=CARD)
            tuned.add(id(self))

    return run


def _restore(owner: type, forward: Any) -> None:
    if forward is not None and owner.__dict__.get("forward") is not forward:
        owner.forward = forward  # type: ignore[attr-defined]
