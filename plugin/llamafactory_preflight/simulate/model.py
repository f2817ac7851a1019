"""The real model on the simulated card, prepared for training by LLaMA-Factory's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate import quantized
from llamafactory_preflight.simulate.arguments import finetuning_arguments, model_arguments
from llamafactory_preflight.simulate.card import CARD


def skeleton(config: Any, model_args: Any) -> nn.Module:
    """Builds the model without storage, its linear layers quantized if wanted, as `from_pretrained` does first."""
    from llamafactory.model.patcher import patch_config

    load_options: dict[str, Any] = {}
    patch_config(config, None, model_args, load_options, is_trainable=True)
    with torch.device("meta"):
        build: Any = auto_class(config).from_config
        model = build(config, dtype=loaded_type(config), attn_implementation=_attention(config))
    model.tie_weights()
    quantized.replace_linear_layers(model, load_options.get("quantization_config"))
    return model  # type: ignore[no-any-return]


def auto_class(config: Any) -> Any:
    """The class of transformers through which LLaMA-Factory loads a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def loaded_type(config: Any) -> torch.dtype:
    """The checkpoint's own type, which LLaMA-Factory loads whatever the run computes in."""
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def _attention(config: Any) -> str | None:
    """FlashAttention-2 needs its package; PyTorch's flash kernel is the same algorithm with the same buffers."""
    wanted = getattr(config, "_attn_implementation", None)
    return "sdpa" if wanted == "flash_attention_2" else wanted


def put_on_card(model: nn.Module) -> None:
    """Gives every parameter and buffer a fake storage on the card, quantizing where the layer asks for it."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in seen:
                seen[id(parameter)] = quantized.load(module, name, parameter)
            module._parameters[name] = seen[id(parameter)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CARD)


def prepare(model: nn.Module, config: Any, run: RunDescription) -> nn.Module:
    """Runs LLaMA-Factory's preparation: checkpointing, casts, freezing and adapters."""
    from llamafactory.model.adapter import init_adapter
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training

    model_args = model_arguments(run)
    prepare_model_for_training(model, model_args)
    model = init_adapter(config, model, model_args, finetuning_arguments(run), is_trainable=True)
    model.train()
    return model


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Returns the list of decoder layers: the one list of modules as long as the text model is deep."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers") and len(module) == num_layers:
            return module
    raise AssertionError("no list of decoder layers")
