"""The shape of a decoder, read from its config.json: all that memory depends on, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.model.vision import VISION_SHAPES, VisionShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.software import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a model type's code does that its config.json does not say.

    Attributes:
        qk_norm: Queries and keys are normed per head.
        qkv_bias: Bias of the three projections; None where config.json's `attention_bias` decides.
        sandwich_norms: A second norm behind attention and behind the MLP.
        wide_norm: The norm computes to its end in float32 (Gemma), not only its statistics.
        moe: The MLPs are experts.
        masked_loss: The loss takes a copy of the logits that are not padding.
        liger: LLaMA-Factory applies liger's kernels to it; for other types it warns and goes on without.
    """

    qk_norm: bool = False
    qkv_bias: bool | None = None
    sandwich_norms: bool = False
    wide_norm: bool = False
    moe: bool = False
    masked_loss: bool = False
    liger: bool = True


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, moe=True),
    "gemma3_text": Family(qk_norm=True, sandwich_norms=True, wide_norm=True),
    "qwen3_vl": Family(qk_norm=True, liger=False),
    "qwen3_vl_moe": Family(qk_norm=True, moe=True, liger=False),
    "qwen2_5_vl": Family(qkv_bias=True),
    "qwen2_vl": Family(qkv_bias=True),
    "gemma3": Family(qk_norm=True, sandwich_norms=True, wide_norm=True, masked_loss=True),
}
"""Model types whose layers are modelled, after transformers' modelling files."""

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_TIED_BY_DEFAULT = {"gemma3", "gemma3_text"}
_GEMMA3 = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
}  # fmt: skip
_DEFAULTS = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}
"""What transformers fills in where the published config.json files are silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Expert layers of a mixture-of-experts decoder.

    Attributes:
        num_experts: Experts of a layer.
        num_experts_per_token: Those that a token is sent to.
        intermediate_size: Width of one expert.
        stacked: A layer keeps its experts in two stacked tensors (transformers 5), not in a list of MLPs.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    stacked: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only language model's dimensions; sizes are element counts."""

    model_type: str
    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: str
    sliding_window: int | None = None
    num_full_attention_layers: int = 0
    moe: MoeShape | None = None
    quantization_method: str | None = None
    quantization_bits: int | None = None
    quantization_group_size: int | None = None
    double_quantization: bool = False
    vision: VisionShape | None = None

    @property
    def query_size(self) -> int:
        """Features of all query heads; not `hidden_size` where heads have a width of their own."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Features of all key (or value) heads."""
        return self.num_key_value_heads * self.head_dim

    def under(self, software: Software) -> ModelShape:
        """The model as the installed transformers builds it."""
        if self.moe is None or software.at_least("transformers", 5):
            return self
        return replace(self, moe=replace(self.moe, stacked=False))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads the fields of a config.json.

        Args:
            config: The parsed file.

        Raises:
            Unmodelled: The model type is not one of `FAMILIES`, or a field that sizes depend on is missing.
        """
        model_type = str(config.get("model_type", ""))
        family = FAMILIES.get(model_type)
        if family is None:
            kind = model_type or "none given"
            raise Unmodelled(
                phrase("Model type `{model_type}` is not one this version has a formula for", model_type=kind)
            )
        outer = config
        config = {**_DEFAULTS.get(model_type, {}), **outer, **outer.get("text_config", {})}
        missing = [name for name in _REQUIRED if not isinstance(config.get(name), int)]
        if missing:
            names = ", ".join(missing)
            raise Unmodelled(
                phrase("config.json of the {model_type} model has no {names}", model_type=model_type, names=names)
            )
        heads = config["num_attention_heads"]
        quantization = outer.get("quantization_config") or {}
        vision = VISION_SHAPES.get(model_type)
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(outer.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=bool(config.get("mlp_bias", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            sliding_window=_sliding_window(config),
            num_full_attention_layers=_full_attention_layers(config),
            moe=_moe(config) if family.moe else None,
            quantization_method=quantization.get("quant_method"),
            quantization_bits=_quantization_bits(quantization),
            quantization_group_size=quantization.get("group_size"),
            double_quantization=bool(quantization.get("bnb_4bit_use_double_quant", False)),
            vision=vision(outer.get("vision_config") or {}, config["hidden_size"]) if vision else None,
        )


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window of those layers that have one; a config may name a window and say that it is not used."""
    window = config.get("sliding_window")
    switched = config.get("use_sliding_window", not str(config.get("model_type", "")).startswith("qwen"))
    return window if isinstance(window, int) and switched else None


def _full_attention_layers(config: Mapping[str, Any]) -> int:
    """Layers without a window in a model that has one."""
    count = int(config["num_hidden_layers"])
    if _sliding_window(config) is None:
        return count
    if config.get("layer_types"):
        return list(config["layer_types"]).count("full_attention")
    gemma = str(config.get("model_type", "")).startswith("gemma3")
    pattern = config.get("sliding_window_pattern", 6 if gemma else None)
    return count // int(pattern) if pattern else min(int(config.get("max_window_layers", 0)), count)


def _quantization_bits(quantization: Mapping[str, Any]) -> int | None:
    """The bits of the weights; bitsandbytes writes two switches instead of a number."""
    if quantization.get("load_in_4bit"):
        return 4
    return 8 if quantization.get("load_in_8bit") else quantization.get("bits")


def _moe(config: Mapping[str, Any]) -> MoeShape:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise Unmodelled("Only some layers of this mixture-of-experts model are sparse")
    return MoeShape(
        num_experts=config["num_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
    )
