"""The real optimizer of a run, from LLaMA-Factory's and the Trainer's own factories."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate.arguments import finetuning_arguments, training_arguments


PAGED_FROM = 100_000  # elements; bitsandbytes keeps smaller states on the card even when paged


def build(model: nn.Module, run: RunDescription) -> torch.optim.Optimizer:
    """Creates the optimizer over two groups, with and without weight decay, as the Trainer does."""
    from llamafactory.train.trainer_utils import create_custom_optimizer
    from transformers import Trainer

    with tempfile.TemporaryDirectory() as folder:
        training_args = training_arguments(run, folder)
    custom = create_custom_optimizer(model, training_args, finetuning_arguments(run))
    if custom is not None:
        return custom  # type: ignore[no-any-return]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(training_args, model)  # type: ignore[arg-type]
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decay = training_args.weight_decay
    groups = [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = kind([group for group in groups if group["params"]], **options)
    if "8bit" in str(run.optim):
        _keep_embeddings_in_32_bit(model)
    return optimizer  # type: ignore[no-any-return]


def _keep_embeddings_in_32_bit(model: nn.Module) -> None:
    """As `Trainer.create_optimizer` does under any 8-bit bitsandbytes optimizer."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def needs_bitsandbytes(run: RunDescription) -> bool:
    """Says whether a run uses any of bitsandbytes, whose import takes seconds."""
    name = run.optim or ""
    return run.quantization_bit is not None or "8bit" in name or "paged" in name or "bnb" in name


def _no_launch(*args: Any, **kwargs: Any) -> None:
    """In the place of an update kernel, which works in place; a mock would keep its arguments alive."""


@contextmanager
def on_paper(run: RunDescription) -> Iterator[None]:
    """Lets optimizers choose what they would on a card: PyTorch's own work on all tensors of a group at once."""
    kinds: list[Any] = _foreach_supported_types
    kinds.append(FakeTensor)
    try:
        with _bitsandbytes_on_paper() if needs_bitsandbytes(run) else nullcontext():
            yield
    finally:
        kinds.remove(FakeTensor)


@contextmanager
def _bitsandbytes_on_paper() -> Iterator[None]:
    """Lets bitsandbytes' optimizers run without its CUDA library, and forgets what they cache in the process."""
    try:
        import bitsandbytes
        from bitsandbytes.optim.optimizer import Optimizer8bit
    except ImportError:
        raise Unmodelled("a run that uses bitsandbytes can only be simulated where it is installed") from None

    def state_buffer(self: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        paged = self.is_paged and parameter.numel() >= PAGED_FROM
        return torch.zeros_like(parameter, dtype=dtype, device="cpu" if paged else parameter.device)

    with (
        mock.patch.object(Optimizer8bit, "get_state_buffer", state_buffer),
        mock.patch.object(bitsandbytes.functional, "optimizer_update_32bit", _no_launch),
        mock.patch.object(bitsandbytes.functional, "optimizer_update_8bit_blockwise", _no_launch),
        mock.patch.object(bitsandbytes.optim.GlobalOptimManager, "_instance", None),
        mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True),
        mock.patch.dict(Optimizer8bit.__dict__.get("name2qmap", {}), clear=True),
    ):
        yield
