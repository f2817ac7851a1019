"""How long a training step takes: floating-point work, bytes that are moved, and kernels that are launched.

A model of three limits, to compare settings of one run with each other. Its figures are those of the hardware and of
the code, none is fitted; it is not meant to tell seconds on a given machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.device import Device
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.layers.checkpointing import checkpointing_kind
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, size
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a card does at best: dense 16-bit operations and bytes of its memory, a second (vendors' data sheets)."""

    operations: float
    bytes: float


SPEEDS = {
    "b200": Speed(operations=2250e12, bytes=8.0e12),
    "h200": Speed(operations=990e12, bytes=4.8e12),
    "h100": Speed(operations=990e12, bytes=3.35e12),
    "a100": Speed(operations=312e12, bytes=2.0e12),
    "l40s": Speed(operations=362e12, bytes=0.86e12),
    "5090": Speed(operations=210e12, bytes=1.79e12),
    "4090": Speed(operations=165e12, bytes=1.01e12),
    "3090": Speed(operations=71e12, bytes=0.94e12),
    "4080": Speed(operations=97e12, bytes=0.72e12),
    "v100": Speed(operations=125e12, bytes=0.9e12),
    "a10": Speed(operations=125e12, bytes=0.6e12),
    "l4": Speed(operations=121e12, bytes=0.3e12),
    "t4": Speed(operations=65e12, bytes=0.32e12),
}
OTHER = SPEEDS["4090"]
REACHED = 0.6  # of the operations: what large matrix products of 16 bit get to
SECONDS_PER_KERNEL = 8e-6  # until Python, torch and the driver have launched one
SECONDS_AROUND = 5e-3  # collating, copying and the Trainer's own work for a micro-batch; a rough figure
# Kernels of a layer's forward pass, and 16-bit elements that the elementwise ones move a token and a hidden element:
# counted in transformers' Qwen3 layer at the widths of the 8B model; with liger's fused norms, rotary embedding and
# MLP; and what adapters on its seven projections add (they compute in float32, so the input is copied). Backward: as
# many times more.
KERNELS, KERNELS_LIGER, KERNELS_ADAPTERS, KERNELS_BACKWARD = 64, 22, 42, 1.6
MOVED, MOVED_LIGER, MOVED_ADAPTERS, MOVED_BACKWARD = 120, 45, 140, 1.7
# Times that a logit is read or written in float32, forward and backward; liger keeps them within a chunk.
LOGIT_PASSES, LOGIT_PASSES_LIGER = 10, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the micro-batches of one optimizer step hold.

    Attributes:
        micro_batches: Their number.
        tokens: Of each, padding included.
        context: Tokens that a token attends to in the mean, of those the kernel computes.
        real_tokens: Of all together, padding left out.
    """

    micro_batches: int
    tokens: float
    context: float
    real_tokens: float


def work(run: RunDescription, lengths: Sequence[int]) -> Work:
    """What a run makes of samples of these lengths.

    Without packing a batch is as long as its longest sample: the mean of the highest of so many drawn from `lengths`.
    """
    ordered = sorted(min(length, run.cutoff_len) for length in lengths)
    mean = sum(ordered) / len(ordered)
    batch, steps = run.per_device_train_batch_size, run.gradient_accumulation_steps
    if run.packing:
        full = batch * run.cutoff_len
        # A knapsack leaves a little over; where no two samples go together, each takes a sequence of its own.
        filled = batch * mean if run.cutoff_len < 2 * mean else 0.95 * full
        context = run.cutoff_len if run.neat_packing and run.flash_attn != "fa2" else run.cutoff_len / 2
        return Work(micro_batches=steps, tokens=full, context=context, real_tokens=steps * filled)
    count = len(ordered)
    longest = sum(
        length * (((rank + 1) / count) ** batch - (rank / count) ** batch) for rank, length in enumerate(ordered)
    )
    padded = -(-longest // 8) * 8
    return Work(micro_batches=steps, tokens=batch * padded, context=padded / 2, real_tokens=steps * batch * mean)


def seconds(run: RunDescription, shape: ModelShape, lengths: Sequence[int], device: Device | None) -> float:
    """Seconds for one real token, padding's cost included."""
    load, card = work(run, lengths), speed_of(device)
    micro = _micro_batch(run, shape, load, card)
    trained = _trained(run, shape)
    # Weights, gradients and two states are read, and three of them written, in float32 unless training is pure 16 bit.
    itemsize = size(BFLOAT16) if run.pure_bf16 else 4
    update = max(trained * itemsize * 7 / card.bytes, 0 if "fused" in (run.optim or "") else _tensors(shape) * 1e-5)
    return (load.micro_batches * (micro + SECONDS_AROUND) + update) / load.real_tokens


def speed_of(device: Device | None) -> Speed:
    """A card's data, by its name; of an unknown card those of a common one, as only their ratio matters here."""
    name = device.name.lower().replace(" ", "") if device is not None else ""
    return next((speed for known, speed in SPEEDS.items() if known in name), OTHER)


def _micro_batch(run: RunDescription, shape: ModelShape, load: Work, card: Speed) -> float:
    layers, tokens, width = shape.num_layers, load.tokens, shape.hidden_size
    adapters = run.finetuning_type in ADAPTERS
    forward = 2 * tokens * _layer(shape) + 4 * tokens * load.context * shape.query_size
    moved = (MOVED_LIGER if run.enable_liger_kernel else MOVED) + (MOVED_ADAPTERS if adapters else 0)
    elements = 2 * tokens * width * moved
    weights = _layer(shape) * (2 if run.quantization_bit is None else 0.5 + 4)  # 4 bit: read, written out, read again
    one = forward / (card.operations * REACHED) + (elements + weights) / card.bytes
    # Gradients of the inputs, and for trained weights of the weights too.
    backward = forward * (1 if adapters else 2) / (card.operations * REACHED)
    backward += (MOVED_BACKWARD * elements + weights) / card.bytes
    kernels = (KERNELS_LIGER if run.enable_liger_kernel else KERNELS) + (KERNELS_ADAPTERS if adapters else 0)
    passes = 1 if checkpointing_kind(run) == "off" else 2
    launched = kernels * SECONDS_PER_KERNEL
    total = layers * (passes * max(one, launched) + max(backward, KERNELS_BACKWARD * launched))
    return total + _head(run, shape, load, card)


def _head(run: RunDescription, shape: ModelShape, load: Work, card: Speed) -> float:
    """The output layer and the loss: forward, and the gradient of the hidden states."""
    logits = load.tokens * shape.vocab_size
    fused = run.enable_liger_kernel and run.stage in ("pt", "sft")  # the others need the logits themselves
    moved = logits * 4 * (LOGIT_PASSES_LIGER if fused else LOGIT_PASSES)
    products = 2 if run.finetuning_type in ADAPTERS else 3
    return products * 2 * logits * shape.hidden_size / (card.operations * REACHED) + moved / card.bytes


def _layer(shape: ModelShape) -> int:
    """Weights of one layer that a token meets."""
    attention = shape.hidden_size * (2 * shape.query_size + 2 * shape.key_size)
    if shape.moe is None:
        return attention + 3 * shape.hidden_size * shape.intermediate_size
    return attention + 3 * shape.hidden_size * shape.moe.intermediate_size * shape.moe.num_experts_per_token


def _trained(run: RunDescription, shape: ModelShape) -> int:
    if run.finetuning_type in ADAPTERS:
        sides = 2 * shape.query_size + 2 * shape.key_size + 3 * shape.intermediate_size + 7 * shape.hidden_size
        return shape.num_layers * run.lora_rank * sides
    return shape.num_layers * _layer(shape) + shape.vocab_size * shape.hidden_size


def _tensors(shape: ModelShape) -> int:
    return shape.num_layers * 14
