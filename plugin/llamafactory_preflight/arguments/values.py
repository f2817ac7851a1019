"""Values of arguments as they were written, turned into the types that a run is described with."""

from __future__ import annotations

from typing import Any

from llamafactory_preflight.arguments import json_argument
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


POSITIVE = frozenset(
    {
        "cutoff_len", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
        "lora_rank", "galore_rank", "apollo_rank", "max_new_tokens", "preprocessing_num_workers", "image_max_pixels",
    }
)  # fmt: skip
LARGEST = 2**31 - 1  # No count of a run that could start is larger.


def converted(name: str, annotation: str, value: Any) -> Any:
    """One argument as `RunDescription` holds it.

    Args:
        name: LLaMA-Factory's name of it.
        annotation: The type that the field is declared with.
        value: What YAML or the command line gave.

    Raises:
        UserError: The value cannot be one of that type, or no run could start with it.
    """
    if name == "deepspeed":
        return json_argument.read(value, "deepspeed", "DeepSpeed")
    if name == "fsdp_config":
        return json_argument.read(value, "fsdp_config", "FSDP")
    if name == "resume_from_checkpoint" and isinstance(value, bool):
        return value
    if name == "fsdp" and isinstance(value, bool):
        return "full_shard" if value else None
    if annotation.startswith("tuple"):
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        return tuple(str(item).strip() for item in items if item is not None)
    if annotation.startswith("str"):
        if isinstance(value, list):
            return ",".join(str(item) for item in value) or None
        return None if value is None or value is False else str(value)
    if value is None:
        if "None" in annotation:
            return None
        raise UserError(phrase("`{name}` is empty", name=name))
    kind = {"bool": bool, "int": int, "float": float}[annotation.removesuffix(" | None")]
    if kind is bool and not isinstance(value, bool):
        raise UserError(phrase("`{name}` is {value}, not true or false", name=name, value=repr(value)))
    try:
        number = kind(value)
    except (OverflowError, TypeError, ValueError):
        raise UserError(phrase("`{name}` is {value}, not a number", name=name, value=repr(value))) from None
    if name in POSITIVE and number < 1:
        raise UserError(phrase("`{name}` is {value}", name=name, value=repr(value)), next_step="Give 1 or more")
    if kind is int and abs(number) > LARGEST:
        what = phrase("`{name}` is {value}, which is more than anything can hold", name=name, value=repr(value))
        raise UserError(what)
    return number
