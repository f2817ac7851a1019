"""What lies on the card between steps, tensor by tensor: weights, adapters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import parameters
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import INT64
from llamafactory_preflight.memory.quantization import quantization, weight_bytes
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """`count` parameter tensors of one size; `width` is the row length of a linear layer's weight."""

    numel: int
    count: int
    width: int = 1
    embedding: bool = False
    matrix: bool = True
    in_layers: bool = True
    norm: bool = False

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return self.numel * self.count


def total(groups: Iterable[Group]) -> int:
    """Elements of all groups."""
    return sum(group.total for group in groups)


def model_groups(shape: ModelShape, *, layers: int | None = None, ends: bool = True) -> list[Group]:
    """The base model's parameters: `layers` of its layers (all by default) and, with `ends`, what is around them."""
    count = shape.num_layers if layers is None else layers
    groups = layer_groups(RunDescription(), shape, count=count)
    if ends:
        heads = 1 if shape.tie_word_embeddings else 2
        groups.append(Group(numel=parameters.embedding_numel(shape), count=1, embedding=True, in_layers=False))
        if heads == 2:
            groups.append(Group(numel=parameters.embedding_numel(shape), count=1, in_layers=False))
        groups.append(Group(numel=shape.hidden_size, count=1, matrix=False, in_layers=False))
    return groups


def layer_groups(run: RunDescription, shape: ModelShape, *, count: int) -> list[Group]:
    """The parameters of `count` layers; under freeze tuning those that it trains."""
    groups = []
    for name, linear in parameters.layer_linears(shape).items():
        if parameters.trains(run, shape, name):
            groups.append(Group(numel=linear.numel, count=count, width=linear.in_features))
            if linear.bias:
                groups.append(Group(numel=linear.out_features, count=count, matrix=False))
    for name, numel in parameters.layer_norms(shape).items():
        if parameters.trains(run, shape, name):
            groups.append(Group(numel=numel, count=count, matrix=False, norm=True))
    if parameters.trains(run, shape, "experts"):
        groups += [Group(numel=n, count=count) for n in parameters.expert_tensors(shape)]
        for name, linear in parameters.expert_linears(shape).items():
            number = count * parameters.copies(shape, name)
            groups.append(Group(numel=linear.numel, count=number, width=linear.in_features))
    return groups


def adapter_groups(run: RunDescription, shape: ModelShape) -> list[Group]:
    """What LoRA and `additional_target` train."""
    per_layer = layer_adapter_groups(run, shape)
    groups = [replace(group, count=group.count * shape.num_layers) for group in per_layer]
    return groups + [outer_module(name, shape) for name in run.additional_target]


def layer_adapter_groups(run: RunDescription, shape: ModelShape) -> list[Group]:
    """LoRA's, DoRA's or OFT's tensors in one layer."""
    groups = []
    if run.finetuning_type == "oft":
        for linear in parameters.lora_targets(run, shape).values():
            count, size = parameters.oft_blocks(run, linear)
            groups.append(Group(numel=count * parameters.oft_angles(size), count=1))
        return groups
    for name, linear in parameters.lora_targets(run, shape).items():
        count = parameters.copies(shape, name)
        groups.append(Group(numel=run.lora_rank * linear.in_features, count=count))
        groups.append(Group(numel=run.lora_rank * linear.out_features, count=count))
        if run.use_dora:
            groups.append(Group(numel=linear.out_features, count=count, matrix=False))
    return groups


def adapter_buffer_bytes(run: RunDescription, shape: ModelShape, block: Callable[[int], int]) -> int:
    """OFT's rows and columns of a block's free elements, 64 bit each, for every rotated layer."""
    if run.finetuning_type != "oft":
        return 0
    sizes = [parameters.oft_blocks(run, linear)[1] for linear in parameters.lora_targets(run, shape).values()]
    per_layer = sum(2 * block(parameters.oft_angles(size) * dtypes.size(INT64)) for size in sizes)
    return shape.num_layers * per_layer


def outer_module(name: str, shape: ModelShape) -> Group:
    """A module outside of the layers by its name.

    Raises:
        Unmodelled: It is neither embedding nor head; `norm` is looked for within names, so it finds every layer's too.
    """
    embedding = parameters.embedding_numel(shape)
    if name == "embed_tokens":
        return Group(numel=embedding, count=1, embedding=True, in_layers=False)
    if name == "lm_head":
        return Group(numel=embedding, count=1, in_layers=False)
    raise Unmodelled(
        phrase("Training the module `{name}` beside the layers or adapters has no formula yet", name=name)
    )


def freeze_groups(run: RunDescription, shape: ModelShape) -> list[Group]:
    """What `finetuning_type: freeze` trains: layers or modules of them, and named modules outside of the layers.

    Raises:
        Unmodelled: An extra module is not a known one.
    """
    groups = layer_groups(run, shape, count=min(abs(run.freeze_trainable_layers), shape.num_layers))
    if parameters.trains_every_norm(run):
        groups = [group for group in groups if not group.norm] + norm_groups(shape, count=shape.num_layers)
        groups.append(Group(numel=shape.hidden_size, count=1, matrix=False, in_layers=False))
    left_out = {"norm", "lm_head"} if shape.tie_word_embeddings else {"norm"}
    return groups + [outer_module(name, shape) for name in run.freeze_extra_modules if name not in left_out]


def norm_groups(shape: ModelShape, *, count: int) -> list[Group]:
    """The norms of `count` layers."""
    return [Group(numel=n, count=count, matrix=False, norm=True) for n in parameters.layer_norms(shape).values()]


def trainable_groups(run: RunDescription, shape: ModelShape) -> list[Group]:
    """Everything that gets a gradient; under BAdam the one layer that trains at a time."""
    if run.use_badam:
        return layer_groups(run, shape, count=1)
    if run.finetuning_type == "full":
        return model_groups(shape)
    if run.finetuning_type == "freeze":
        return freeze_groups(run, shape)
    return adapter_groups(run, shape)


def base_weight_bytes(
    run: RunDescription, shape: ModelShape, *, loaded: int, trained: int, block: Callable[[int], int]
) -> int:
    """Bytes of the base model as it lies on the card.

    Args:
        run: The run.
        shape: The model.
        loaded: Type of the checkpoint.
        trained: Type of what is trained.
        block: Bytes that the allocator counts for a request.
    """
    vision = vision_bytes(run, shape, loaded, block)
    everything = total(model_groups(shape))
    if run.finetuning_type == "full":
        return everything * dtypes.size(trained) + vision
    if run.finetuning_type == "freeze":
        upcast = total(freeze_groups(run, shape))
        return everything * dtypes.size(loaded) + upcast * (dtypes.size(trained) - dtypes.size(loaded)) + vision
    kind = quantization(run, shape)
    if kind is None:
        return everything * dtypes.size(loaded) + vision
    linears = list(parameters.every_linear(shape))
    unquantized = everything - shape.num_layers * sum(count * linear.numel for linear, count in linears)
    quantized = sum(count * weight_bytes(kind, linear.numel, linear.out_features, block) for linear, count in linears)
    return unquantized * dtypes.size(loaded) + shape.num_layers * quantized + vision


def vision_bytes(run: RunDescription, shape: ModelShape, loaded: int, block: Callable[[int], int]) -> int:
    """Bytes of the vision tower and projector, which stay frozen; quantization takes their linear layers too."""
    if shape.vision is None:
        return 0
    size = shape.vision.numel * dtypes.size(loaded)
    kind = quantization(run, shape)
    if kind is None:
        return size
    for linear in shape.vision.linears:
        quantized = weight_bytes(kind, linear.numel, linear.out_features, block)
        size += linear.count * (quantized - linear.numel * dtypes.size(loaded))
    return size


def tensor_bytes(groups: Iterable[Group], itemsize: int, block: Callable[[int], int]) -> int:
    """Bytes of one tensor for each parameter, as the allocator counts them."""
    return sum(group.count * block(group.numel * itemsize) for group in groups)
