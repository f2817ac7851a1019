"""Values that LLaMA-Factory's parser takes, and that end the run once the data or the weights are loaded."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache

from llamafactory_preflight.arguments.schema import package_folder
from llamafactory_preflight.memory.parameters import expert_linears, layer_linears
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


BITS = {"bnb": (4, 8), "hqq": (1, 2, 3, 4, 5, 6, 8), "eetq": (8,)}
"""What a method quantizes to. Source: llamafactory/model/model_utils/quantization.py."""
MODULES = frozenset({"embed_tokens", "lm_head", "gate", "experts", "mlp", "self_attn", "layers", "model", "norm"})
"""Names outside of the linear layers that PEFT finds in a decoder, whatever it says to them."""
REPORTERS = ("transformers", "integrations", "integration_utils.py", "INTEGRATION_TO_CALLBACK")


def samples(run: RunDescription) -> Iterator[Finding]:
    """LLaMA-Factory cuts the data to `max_samples` and looks at the first one (data/loader.py)."""
    is_read = (run.dataset or run.eval_dataset) and not (run.tokenized_path and os.path.isdir(run.tokenized_path))
    if run.max_samples is not None and run.max_samples < 1 and is_read:
        yield Finding(
            id="no-samples",
            severity="error",
            message=phrase(
                "`max_samples: {number}` leaves no data. Leave it out to take all of it.", number=run.max_samples
            ),
        )


def quantization(run: RunDescription, shape: ModelShape | None) -> Iterator[Finding]:
    """The number of bits counts only where the checkpoint is not quantized already."""
    bits, known = run.quantization_bit, BITS.get(run.quantization_method, ())
    exports = "export_quantization_bit" in run.unmodelled
    if bits is not None and known and bits not in known and not exports and shape and not shape.quantization_method:
        yield Finding(
            id="quantization-bits",
            severity="error",
            message=phrase(
                "`quantization_bit: {bits}` is none that `quantization_method: {method}` knows. It knows {known}.",
                bits=bits,
                method=run.quantization_method,
                known=", ".join(map(str, known)),
            ),
            set={"quantization_bit": 4 if 4 in known else 8},
        )


def adapter(run: RunDescription, shape: ModelShape | None) -> Iterator[Finding]:
    """What PEFT refuses when it makes a new adapter, once the weights are loaded."""
    others = run.use_unsloth or run.use_kt or run.mixture_of_depths is not None
    goes_on = run.adapter_name_or_path and not run.create_new_adapter
    if run.finetuning_type != "lora" or not run.do_train or others or goes_on:
        return
    if run.lora_dropout > 1:
        yield Finding(
            id="dropout-range",
            severity="error",
            message=phrase("`lora_dropout: {value}` is a share, from 0 to 1.", value=run.lora_dropout),
            set={"lora_dropout": 0.0},
        )
    if shape is None or shape.vision is not None:
        return
    linears = {*layer_linears(shape), *expert_linears(shape)}
    if not any(_may_be_found(name, linears) for name in run.lora_target):
        yield Finding(
            id="lora-target-unknown",
            severity="error",
            message=phrase(
                "The model has no module that `lora_target: {names}` names. It has {known}; `all` means all of them.",
                names=", ".join(run.lora_target),
                known=", ".join(sorted(linears)),
            ),
            set={"lora_target": "all"},
        )


def _may_be_found(name: str, linears: Collection[str]) -> bool:
    return name == "all" or name in linears or name in MODULES or re.fullmatch(r"[a-z_]+", name) is None


def reports(run: RunDescription) -> Iterator[Finding]:
    """The Trainer looks loggers up by name when it is made, once the weights are loaded."""
    known = _reporters()
    for name in run.report_to:
        if known and name not in (*known, "all", "none", "None", "", "swanlab"):
            yield Finding(
                id="logger-unknown",
                severity="error",
                message=phrase(
                    "`report_to: {name}` is no logger that transformers knows. It knows {known}; `none` reports "
                    "nowhere.",
                    name=name,
                    known=", ".join(known),
                ),
            )


def _reporters() -> tuple[str, ...]:
    """The names in the program, which may have added some, or else in its source."""
    loaded = sys.modules.get("transformers.integrations.integration_utils")
    return tuple(getattr(loaded, REPORTERS[-1], ())) if loaded else _written_reporters()


@lru_cache(maxsize=1)
def _written_reporters() -> tuple[str, ...]:
    package, *path, name = REPORTERS
    folder = package_folder(package)
    try:
        text = folder.joinpath(*path).read_text(encoding="utf-8") if folder else ""
        start = text.index(f"\n{name} = {{") + 1
        tree = ast.parse(text[start : text.index("}", start) + 1])
    except (OSError, ValueError, SyntaxError):
        return ()
    (assigned,) = tree.body
    keys = assigned.value.keys if isinstance(assigned, ast.Assign) and isinstance(assigned.value, ast.Dict) else []
    return tuple(str(key.value) for key in keys if isinstance(key, ast.Constant))
