"""Every parameter of a decoder by name: sizes, what is trained, in which type it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """A linear layer's features."""

    in_features: int
    out_features: int
    bias: bool = False

    @property
    def numel(self) -> int:
        """Elements of the weight matrix."""
        return self.in_features * self.out_features


def layer_linears(shape: ModelShape) -> dict[str, LinearShape]:
    """The linear modules of one decoder layer, in module order.

    The experts of a sparse layer are not among them, and neither is the router where transformers 5 makes it no module
    of that kind.
    """
    hidden, query, key, width = shape.hidden_size, shape.query_size, shape.key_size, shape.intermediate_size
    linears = {
        "q_proj": LinearShape(in_features=hidden, out_features=query, bias=shape.qkv_bias),
        "k_proj": LinearShape(in_features=hidden, out_features=key, bias=shape.qkv_bias),
        "v_proj": LinearShape(in_features=hidden, out_features=key, bias=shape.qkv_bias),
        "o_proj": LinearShape(in_features=query, out_features=hidden, bias=shape.output_bias),
    }
    if shape.moe is None:
        linears |= {
            "gate_proj": LinearShape(in_features=hidden, out_features=width, bias=shape.mlp_bias),
            "up_proj": LinearShape(in_features=hidden, out_features=width, bias=shape.mlp_bias),
            "down_proj": LinearShape(in_features=width, out_features=hidden, bias=shape.mlp_bias),
        }
    elif not shape.moe.stacked:
        linears |= {"gate": LinearShape(in_features=hidden, out_features=shape.moe.num_experts)}
    return linears


def expert_linears(shape: ModelShape) -> dict[str, LinearShape]:
    """The linear modules of one expert, where transformers 4 lists the experts of a layer."""
    if shape.moe is None or shape.moe.stacked:
        return {}
    hidden, width = shape.hidden_size, shape.moe.intermediate_size
    return {
        "gate_proj": LinearShape(in_features=hidden, out_features=width),
        "up_proj": LinearShape(in_features=hidden, out_features=width),
        "down_proj": LinearShape(in_features=width, out_features=hidden),
    }


def every_linear(shape: ModelShape) -> Iterator[tuple[LinearShape, int]]:
    """The linear modules of a layer, each with how many a layer has of it."""
    yield from ((linear, 1) for linear in layer_linears(shape).values())
    yield from ((linear, copies(shape, name)) for name, linear in expert_linears(shape).items())


def copies(shape: ModelShape, name: str) -> int:
    """How many linear modules of this name a layer has."""
    return shape.moe.num_experts if shape.moe is not None and name in expert_linears(shape) else 1


def layer_norms(shape: ModelShape) -> dict[str, int]:
    """The norms of one decoder layer and their elements, under the names `decoder.DecoderLayer` calls them by."""
    norms = {"input_layernorm": shape.hidden_size}
    if shape.family.qk_norm:
        norms |= {"q_norm": shape.head_dim, "k_norm": shape.head_dim}
    if shape.family.sandwich_norms:
        norms |= {"post_attention_norm": shape.hidden_size}
    norms |= {"pre_mlp_norm": shape.hidden_size}
    if shape.family.sandwich_norms:
        norms |= {"post_mlp_norm": shape.hidden_size}
    return norms


def trains(run: RunDescription, shape: ModelShape, name: str) -> bool:
    """Whether freeze tuning trains this part of a layer that it trains at all."""
    if run.finetuning_type != "freeze" or "all" in run.freeze_trainable_modules:
        return True
    return _module(shape, name) in run.freeze_trainable_modules


def trains_every_norm(run: RunDescription) -> bool:
    """`norm` as an extra module of freeze tuning is looked for within names, so it finds the norms of every layer."""
    return run.finetuning_type == "freeze" and "norm" in run.freeze_extra_modules


def _module(shape: ModelShape, name: str) -> str:
    """The module of transformers' decoder layer that a linear layer or a norm belongs to."""
    if name in (*ATTENTION_LINEARS, "q_norm", "k_norm"):
        return "self_attn"
    if name in (*MLP_LINEARS, "gate", "experts"):
        return "mlp"
    sandwich = shape.family.sandwich_norms
    return {
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }.get(name, name)


def expert_tensors(shape: ModelShape) -> list[int]:
    """Elements of a sparse layer's router and experts, which transformers 5 keeps in two stacked tensors."""
    if shape.moe is None or not shape.moe.stacked:
        return []
    moe, hidden = shape.moe, shape.hidden_size
    per_projection = moe.num_experts * moe.intermediate_size * hidden
    return [moe.num_experts * hidden, 2 * per_projection, per_projection]


def embedding_numel(shape: ModelShape) -> int:
    """Elements of the input embedding (and of an untied head)."""
    return shape.vocab_size * shape.hidden_size


def lora_targets(run: RunDescription, shape: ModelShape) -> dict[str, LinearShape]:
    """The linear modules of a layer or an expert that get an adapter.

    `all` is what LLaMA-Factory's find_all_linear_modules finds: the router too, where it is one. It reads
    `lora_target` for OFT as well (model/adapter.py).

    Raises:
        Unmodelled: A name is given as a regular expression or lies outside of the decoder layers.
    """
    linears = layer_linears(shape) | expert_linears(shape)
    names = run.lora_target
    if names == ("all",):
        return linears
    unknown = [name for name in names if name not in linears]
    if unknown:
        listed = ", ".join(unknown)
        raise Unmodelled(
            phrase("LoRA target {names} is not a linear layer that every decoder layer has", names=listed)
        )
    return {name: linear for name, linear in linears.items() if name in names}


def oft_blocks(run: RunDescription, linear: LinearShape) -> tuple[int, int]:
    """Number and size of the blocks in which OFT rotates a linear layer's input.

    Raises:
        Unmodelled: PEFT would change what was asked for to something that divides the input.
    """
    count, size = run.oft_rank, run.oft_block_size
    if (count == 0) == (size == 0) or linear.in_features % (count or size):
        raise Unmodelled(
            phrase(
                "OFT with {count} blocks of {size} does not divide {features} features",
                count=count,
                size=size,
                features=linear.in_features,
            )
        )
    return count or linear.in_features // size, size or linear.in_features // count


def oft_angles(block_size: int) -> int:
    """Free elements of a skew-symmetric block."""
    return block_size * (block_size - 1) // 2
