"""Who holds what when several processes train one model: the ranks, and every parameter in the order they share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from llamafactory_preflight.memory import parameters
from llamafactory_preflight.memory.paper.ledger import Leaf, Storage
from llamafactory_preflight.memory.parameters import LinearShape
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


NCCL_BYTES = 372 * 2**20
"""What NCCL takes on the card outside of torch's allocator, a rank: measured with NCCL 2.28.9 and two ranks on one
H200 that talk over sockets, alike for a communicator made at once or later; NVLink and shared memory have others."""
ENDS = -1
"""The layer of what stands around the layers."""
VALUE_HEAD = "value_head"
"""The weight of a reward model's own head."""
Key = tuple[int, str]
"""A parameter's layer and name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Processes that train together, one a GPU; `local` of them on this machine."""

    world: int = 1
    local: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        key: Its layer and name, as `Builder` calls it.
        numel: Elements.
        trained: Whether it gets a gradient.
        decays: Whether transformers lets its weight decay: norms and biases stand in a group of their own.
    """

    key: Key
    numel: int
    trained: bool
    decays: bool = True


class Gradients(Protocol):
    """What ranks that share gradients do with them."""

    def gradient(self, key: Key) -> Storage | None:
        """What a parameter has accumulated so far and keeps."""

    def receive(self, key: Key, leaf: Leaf) -> None:
        """A parameter's gradient came."""


def in_order(run: RunDescription, shape: ModelShape) -> tuple[Parameter, ...]:
    """Every parameter, in the order of `model.named_parameters()`."""
    full = run.finetuning_type == "full"
    extra = run.freeze_extra_modules if run.finetuning_type == "freeze" else run.additional_target
    size = parameters.embedding_numel(shape)
    first = Parameter(key=(ENDS, "embed_tokens"), numel=size, trained=full or "embed_tokens" in extra)
    norm = Parameter(
        key=(ENDS, "norm"), numel=shape.hidden_size, trained=full or parameters.trains_every_norm(run), decays=False
    )
    last = replace(first, key=(ENDS, "lm_head"), trained=full or "lm_head" in extra)
    layers = [parameter for layer in range(shape.num_layers) for parameter in _layer(run, shape, layer)]
    heads = () if shape.tie_word_embeddings else (last,)
    return (first, *layers, norm, *heads, *(_value_head(shape) if run.stage == "rm" else ()))


def frozen(shape: ModelShape) -> tuple[Parameter, ...]:
    """The parameters of a model that nothing is trained of."""
    return in_order(RunDescription(finetuning_type="freeze", freeze_trainable_layers=0), shape)


def _value_head(shape: ModelShape) -> Iterator[Parameter]:
    yield Parameter(key=(ENDS, VALUE_HEAD), numel=shape.hidden_size, trained=True)
    yield Parameter(key=(ENDS, f"{VALUE_HEAD}.bias"), numel=1, trained=True, decays=False)


def _layer(run: RunDescription, shape: ModelShape, layer: int) -> Iterator[Parameter]:
    """A layer's parameters: attention, its norms, MLP, the norms around both (transformers' decoder layers)."""
    linears = parameters.layer_linears(shape)
    norms = parameters.layer_norms(shape)
    for name in parameters.ATTENTION_LINEARS:
        yield from _linear(run, shape, layer, name, linears[name])
    yield from (_norm(run, shape, layer, name, norms[name]) for name in ("q_norm", "k_norm") if name in norms)
    for name in parameters.MLP_LINEARS:
        if name in linears:
            yield from _linear(run, shape, layer, name, linears[name])
    trained = trains_layer(run, shape, layer) and parameters.trains(run, shape, "experts")
    for name, numel in zip(("router", "gate_up", "down"), parameters.expert_tensors(shape), strict=False):
        yield Parameter(key=(layer, name), numel=numel, trained=trained)
    for name, numel in norms.items():
        if name not in ("q_norm", "k_norm"):
            yield _norm(run, shape, layer, name, numel)


def trains_layer(run: RunDescription, shape: ModelShape, layer: int) -> bool:
    """Whether full or freeze tuning trains a layer's own parameters."""
    if run.finetuning_type != "freeze":
        return run.finetuning_type == "full"
    count = min(abs(run.freeze_trainable_layers), shape.num_layers)
    return layer < count if run.freeze_trainable_layers < 0 else layer >= shape.num_layers - count


def _norm(run: RunDescription, shape: ModelShape, layer: int, name: str, numel: int) -> Parameter:
    trained = trains_layer(run, shape, layer) and parameters.trains(run, shape, name)
    return Parameter(
        key=(layer, name), numel=numel, trained=trained or parameters.trains_every_norm(run), decays=False
    )


def _linear(run: RunDescription, shape: ModelShape, layer: int, name: str, linear: LinearShape) -> Iterator[Parameter]:
    trained = trains_layer(run, shape, layer) and parameters.trains(run, shape, name)
    yield Parameter(key=(layer, name), numel=linear.numel, trained=trained)
    if linear.bias:
        yield Parameter(key=(layer, f"{name}.bias"), numel=linear.out_features, trained=trained, decays=False)
    if run.finetuning_type == "lora" and name in parameters.lora_targets(run, shape):
        yield Parameter(key=(layer, f"{name}.a"), numel=run.lora_rank * linear.in_features, trained=True)
        yield Parameter(key=(layer, f"{name}.b"), numel=run.lora_rank * linear.out_features, trained=True)
        if run.use_dora:
            yield Parameter(key=(layer, f"{name}.m"), numel=linear.out_features, trained=True)


def groups(everything: Sequence[Parameter]) -> list[list[Parameter]]:
    """What is trained, in the optimizer's groups: with weight decay and without; DeepSpeed drops an empty one."""
    trained = [parameter for parameter in everything if parameter.trained]
    split = [[parameter for parameter in trained if parameter.decays is decays] for decays in (True, False)]
    return [group for group in split if group]


FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
"""Bytes after which torch's DistributedDataParallel closes a bucket of gradients, the first and every other."""


def ddp_bucket_bytes(run: RunDescription, shape: ModelShape, itemsize: int, block: Callable[[int], int]) -> int:
    """Flat copies of all gradients that torch's DistributedDataParallel reduces.

    Source: torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, initialize_buckets); without
    `gradient_as_bucket_view` they exist beside the gradients. Parameters come in reverse order.
    """
    total, current, limit = 0, 0, FIRST_BUCKET
    for parameter in reversed(in_order(run, shape)):
        if parameter.trained:
            current += parameter.numel * itemsize
            if current >= limit:
                total, current, limit = total + block(current), 0, BUCKET
    return total + block(current)


SYNC_BUCKET = 250 * 2**20
"""Bytes after which DistributedDataParallel closes a bucket of parameters that it sends to the other ranks."""


def ddp_sync_bytes(tensors: Sequence[tuple[int, int]], block: Callable[[int], int]) -> int:
    """Flat copies of parameters while torch's DistributedDataParallel makes them equal on all ranks, frozen ones too.

    Source: torch/csrc/distributed/c10d/comm.cpp (broadcast_coalesced): buckets of one type, in the order of their
    first tensor, two of them on their way at once; a tensor that is alone in its bucket is not copied.

    Args:
        tensors: Type and bytes of every parameter, in order.
        block: Rounds up as the allocator does.
    """
    closed: list[tuple[int, list[int]]] = []
    growing: dict[int, tuple[int, list[int]]] = {}
    for number, (dtype, size) in enumerate(tensors):
        bucket = growing.setdefault(dtype, (number, []))
        bucket[1].append(size)
        if sum(bucket[1]) >= SYNC_BUCKET:
            closed.append(growing.pop(dtype))
    flat = [block(sum(sizes)) if len(sizes) > 1 else 0 for _, sizes in sorted([*closed, *growing.values()])]
    return max((one + other for one, other in pairwise([*flat, 0])), default=0)
