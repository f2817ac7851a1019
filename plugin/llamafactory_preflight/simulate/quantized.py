"""bitsandbytes' own layers over fake quantized weights; only the parameter class cannot be a fake tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llamafactory_preflight.simulate.card import CARD


def replace_linear_layers(model: Any, settings: Any) -> None:
    """Lets transformers' quantizer swap the linear layers of a model without storage."""
    if settings is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(settings)
    quantizer._process_model_before_weight_loading(model, device_map=None)
    quantizer._process_model_after_weight_loading(model)
    model.is_quantized = True
    model.hf_quantizer = quantizer
    model.quantization_method = quantizer.quantization_config.quant_method
    model.config.quantization_config = quantizer.quantization_config


def load(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Returns the parameter of `module` as it is after loading: on the card, packed where the layer is quantized."""
    kind = type(module).__name__
    if name == "weight" and kind == "Linear4bit":
        return _pack_4bit(module, parameter)
    if name == "weight" and kind == "Linear8bitLt":
        return _pack_8bit(module, parameter)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=CARD)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _pack_4bit(module: Any, parameter: Any) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit

    value = torch.empty(parameter.shape, dtype=_half(parameter), device=CARD)
    packed, state = quantize_4bit(
        value,
        blocksize=parameter.blocksize,
        compress_statistics=parameter.compress_statistics,
        quant_type=parameter.quant_type,
        quant_storage=parameter.quant_storage,
    )
    weight = nn.Parameter(packed, requires_grad=False)
    for attribute in ("blocksize", "compress_statistics", "quant_type", "quant_storage"):
        setattr(weight, attribute, getattr(parameter, attribute))
    weight.quant_state = module.quant_state = state  # type: ignore[attr-defined]
    weight.bnb_quantized = True  # type: ignore[attr-defined]
    return weight


def _pack_8bit(module: Any, parameter: Any) -> nn.Parameter:
    """One byte a weight and one float32 a row (`Int8Params`)."""
    value = torch.empty(parameter.shape, dtype=_half(parameter), device=CARD)
    rows, row_maxima, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(value)
    weight = nn.Parameter(rows, requires_grad=False)
    weight.CB, weight.SCB, weight.has_fp16_weights = rows, row_maxima, False  # type: ignore[attr-defined]
    module.state.CB, module.state.SCB = rows, row_maxima
    return weight


def _half(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype.is_floating_point else torch.bfloat16
