"""Liger's own Python code with its Triton launches left out: its buffers are allocated, nothing is computed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from llamafactory_preflight.errors import Unmodelled


@contextmanager
def launches_left_out(model_type: str) -> Iterator[None]:
    """Lets Liger run on fake tensors, and afterwards takes its patches off the model's classes.

    LLaMA-Factory patches the classes of the whole process, so the next simulation would have Liger too.
    """
    try:
        import triton
        from liger_kernel.transformers import monkey_patch  # noqa: F401
    except ImportError as error:
        raise Unmodelled(f"`enable_liger_kernel` can only be simulated where liger-kernel and triton are installed: {error}") from None
    from transformers.loss import loss_utils

    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    functional = loss_utils.nn.functional
    classes = {value: value.__dict__.get("forward") for value in vars(modeling).values() if isinstance(value, type)}
    names, cross_entropy = dict(vars(modeling)), functional.cross_entropy
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.jit.JITFunction, "run", lambda *args, **kwargs: None))
        stack.enter_context(mock.patch("torch.cuda.device", lambda *args: nullcontext()))
        try:
            yield
        finally:
            vars(modeling).update(names)
            functional.cross_entropy = cross_entropy
            for owner, forward in classes.items():
                _restore(owner, forward)


def _restore(owner: type, forward: Any) -> None:
    if forward is not None and owner.__dict__.get("forward") is not forward:
        owner.forward = forward  # type: ignore[attr-defined]
