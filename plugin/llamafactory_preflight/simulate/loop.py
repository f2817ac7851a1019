"""The training loop of transformers' Trainer as LLaMA-Factory runs it, cut into stretches of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate.arguments import compute_dtype
from llamafactory_preflight.simulate.card import CARD
from llamafactory_preflight.simulate.pictures import Pictures
from llamafactory_preflight.simulate.storage import StorageTracker


PAD_MULTIPLE = 8
Batch = dict[str, torch.Tensor]


def sequence_length(run: RunDescription) -> int:
    """Tokens of one row: the cutoff, which the collators of all stages but `pt` pad to a multiple of 8.

    A packed row is no longer: LLaMA-Factory takes a token off the cutoff (data_args.py) and puts one of padding back
    (processor/supervised.py).
    """
    return run.cutoff_len if run.stage == "pt" else -(-run.cutoff_len // PAD_MULTIPLE) * PAD_MULTIPLE


def is_padded(run: RunDescription) -> bool:
    """Whether even a row of the longest samples ends in padding, so that attention needs a mask."""
    return sequence_length(run) > run.cutoff_len


def make_batch(run: RunDescription, rows: int, pictures: Pictures | None = None) -> Batch:
    """One collated batch on the card, with the same pictures in every row."""
    length = sequence_length(run)
    names = ["input_ids", "labels"]
    if run.packing and run.stage == "sft":
        names.append("position_ids")
    batch = {name: torch.zeros((rows, length), dtype=torch.int64, device=CARD) for name in names}
    if run.neat_packing and run.flash_attn != "fa2":  # SFTDataCollatorWith4DAttentionMask
        mask = torch.zeros((rows, 1, length, length), dtype=compute_dtype(run) or torch.float32, device=CARD)
    else:
        mask = torch.ones((rows, length), dtype=torch.int64, device=CARD)
    return {**batch, "attention_mask": mask} | (pictures.inputs(rows, length) if pictures is not None else {})


def wrap_forward(model: nn.Module, run: RunDescription) -> None:
    """Puts autocast around `forward` and makes its outputs float32, as `Accelerator.prepare_model` does."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    if not (run.bf16 or run.fp16):
        return
    forward = type(model).forward
    cast = torch.autocast("cuda", dtype=torch.bfloat16 if run.bf16 else torch.float16)(forward)
    model.forward = MethodType(cast, model)
    model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)


@contextmanager
def watched_layers(layers: nn.ModuleList, tracker: StorageTracker, *, front: int, back: int) -> Iterator[None]:
    """Cuts forward and backward into stretches: one for each of the first and last layers, one for the rest.

    A stretch's peak is then linear in the number of layers, which that of the whole pass need not be: the peak may
    move from the loss to the first layers' gradients as a model deepens.
    """
    handles = []
    count = len(layers)

    def position(index: int) -> str:
        if index < front:
            return f"layer {index}"
        return f"layer {index - count}" if index >= count - back else "layers between"

    for index, layer in enumerate(layers):

        def entered(*_: Any, name: str = position(index)) -> None:
            _cut(tracker, name)  # in the backward pass, this is the recomputation of a checkpointed layer

        def left(_: Any, __: Any, output: Any, name: str = position(index), last: bool = index == count - 1) -> None:
            if last and _phase(tracker) == "forward":
                _cut(tracker, "head")
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: _cut(tracker, name))  # type: ignore[no-untyped-call]

        handles += [layer.register_forward_pre_hook(entered), layer.register_forward_hook(left)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _phase(tracker: StorageTracker) -> str:
    return tracker.stretches[-1][1].split("/")[-2]


def _cut(tracker: StorageTracker, name: str) -> None:
    tracker.stretch("/".join([*tracker.stretches[-1][1].split("/")[:-1], name]))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: RunDescription,
    tracker: StorageTracker,
    *,
    first: bool,
    pictures: Pictures | None = None,
) -> list[Batch]:
    """Runs an optimizer step beside its states, with as many micro-steps as differ in what is alive.

    Args:
        model: The prepared model.
        optimizer: Its optimizer.
        run: The run.
        tracker: Follows what is allocated.
        first: Run the first step too, which has no states yet, but tunes kernels; otherwise states are only created.
        pictures: The images of every sample.

    Returns:
        The step's micro-batches, which the Trainer keeps until it has fetched those of the next.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaler = torch.ones((), device=CARD) if run.fp16 else None
    batches: list[Batch] = []
    if first:
        batches = _micro_steps(model, run, tracker, trained, scaler, pictures, step=0)
    else:
        tracker.stretch("optimizer_step/0")
        tracker.allocating("gradients")
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    _optimizer_step(model, optimizer, run, tracker, trained, step=0)
    batches.clear()
    batches = _micro_steps(model, run, tracker, trained, scaler, pictures, step=1)
    _optimizer_step(model, optimizer, run, tracker, trained, step=1)
    return batches


def _micro_steps(
    model: nn.Module,
    run: RunDescription,
    tracker: StorageTracker,
    trained: list[nn.Parameter],
    scaler: torch.Tensor | None,
    pictures: Pictures | None,
    *,
    step: int,
) -> list[Batch]:
    tracker.stretch(f"forward_backward/{step}/data/data")
    tracker.allocating("buffers")
    rows = run.per_device_train_batch_size
    batches = [make_batch(run, rows, pictures) for _ in range(run.gradient_accumulation_steps)]
    num_items = torch.zeros((), dtype=torch.int64, device=CARD)
    total = torch.zeros((), device=CARD)
    tracker.allocating("activations")
    for micro_step, batch in enumerate(batches[: step + 1]):  # from the second micro-step on all are alike
        name = f"forward_backward/{step}.{micro_step}"
        tracker.stretch(f"{name}/forward/embedding")
        loss = model(**batch, num_items_in_batch=num_items)["loss"]
        tracker.stretch(f"{name}/backward/head")
        # Not `Tensor.backward`, which is itself seen by CudaAutocast and would run without it.
        torch.autograd.backward(loss if scaler is None else loss * scaler)
        total += loss.detach()
        del loss  # and with it the graph, as when `Trainer.training_step` returns
        tracker.belongs((parameter.grad for parameter in trained if parameter.grad is not None), "gradients")
    return batches


def _optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: RunDescription,
    tracker: StorageTracker,
    trained: list[nn.Parameter],
    *,
    step: int,
) -> None:
    tracker.stretch(f"optimizer_step/{step}")
    tracker.allocating("buffers")
    if run.max_grad_norm > 0:
        torch.nn.utils.clip_grad_norm_(trained, run.max_grad_norm)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    tracker.belongs((value for value in states if isinstance(value, torch.Tensor)), "optimizer")
    tracker.allocating("activations")
    model.zero_grad()
    tracker.stretch("save/save/save/save")


def evaluate(model: nn.Module, run: RunDescription, tracker: StorageTracker, pictures: Pictures | None = None) -> None:
    """Runs one evaluation batch as `Trainer.prediction_step` does: it holds the outputs beside the loss."""
    tracker.stretch("evaluate/evaluate/forward/embedding")
    model.eval()
    with torch.no_grad():
        batch = make_batch(run, run.per_device_eval_batch_size, pictures)
        outputs = model(**batch, num_items_in_batch=torch.zeros((), dtype=torch.int64, device=CARD))
        outputs["loss"].detach().mean()
    model.train()
