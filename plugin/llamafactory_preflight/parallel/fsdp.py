"""What a run's FSDP settings mean for memory: from its arguments, or from what `accelerate launch` sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory_preflight import arguments
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


SWITCH = "ACCELERATE_USE_FSDP"
PRECISION = "ACCELERATE_MIXED_PRECISION"
PREFIX = "FSDP_"
LAUNCHED = {
    "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000.0", "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}  # fmt: skip
"""What `accelerate launch` sets where its configuration says nothing (accelerate/commands/launch.py)."""
RENAMED = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan:
    """The settings that decide memory.

    Attributes:
        version: 1 (flat parameters) or 2 (each parameter a DTensor).
        reshards: Whether a layer's parameters are let go after its forward (FULL_SHARD) or kept until its backward
            (SHARD_GRAD_OP).
        offloads: Whether shards, their gradients and the optimizer live in main memory.
        prefetches: Whether a layer's backward gathers the next one ahead; version 2 always does.
        loads_once: Whether only the first process of a machine reads the weights, and all build them in main memory.
        launched: Whether `accelerate launch` asks for it: LLaMA-Factory looks at its environment while it loads.
        precision: What the launcher asks for: `bf16`, `fp16`, `no` or nothing.
        unmodelled: Settings that put a run on code that no formula follows.
    """

    version: int
    reshards: bool
    offloads: bool
    prefetches: bool
    loads_once: bool
    launched: bool
    precision: str
    unmodelled: tuple[str, ...]


def launched_with(env: Mapping[str, str]) -> dict[str, str] | None:
    """The variables by which `accelerate launch` asks for FSDP, or None where it does not."""
    if env.get(SWITCH, "").lower() != "true":
        return None
    return {name: value for name, value in env.items() if name.startswith(PREFIX) or name in (SWITCH, PRECISION)}


def from_file(file: Path | None) -> dict[str, str] | None:
    """The variables that `accelerate launch` would set for a file; none of them where that asks for no FSDP.

    Raises:
        UserError: The file is none of accelerate's.
    """
    return None if file is None else from_accelerate(arguments.read(file), origin=str(file)) or {}


def from_accelerate(config: Mapping[str, Any], *, origin: str) -> dict[str, str] | None:
    """The variables that `accelerate launch --config_file` would set, or None for a configuration without FSDP.

    Raises:
        UserError: It is no configuration of accelerate.
    """
    if "distributed_type" not in config:
        raise UserError("This is no configuration of accelerate: it has no `distributed_type`", where=origin)
    if config["distributed_type"] != "FSDP":
        return None
    section = config.get("fsdp_config") or {}
    if not isinstance(section, Mapping):
        raise UserError("`fsdp_config` is not a mapping", where=origin)
    given = {RENAMED.get(str(key).upper(), str(key).upper()): value for key, value in section.items()}
    env = LAUNCHED | {key: _word(value) for key, value in given.items() if value is not None}
    return env | {SWITCH: "true", PRECISION: _word(config.get("mixed_precision") or "no")}


def plan(fsdp: str | None, config: Mapping[str, Any] | None, env: Mapping[str, str] | None) -> FsdpPlan | None:
    """The plan of a run, or None where it has no FSDP.

    Args:
        fsdp: The Trainer's `fsdp` argument; it goes before the launcher's.
        config: The Trainer's `fsdp_config`.
        env: What the launcher sets, or None.

    Raises:
        UserError: A value that accelerate refuses.
    """
    options = (fsdp or "").replace(",", " ").split()
    if options:
        return _of_arguments(options, config or {}, env or {})
    return _of_launcher(env) if env else None


def _of_launcher(env: Mapping[str, str]) -> FsdpPlan:
    """Accelerate's FullyShardedDataParallelPlugin without arguments (accelerate/utils/dataclasses.py)."""
    version = _version(env.get("FSDP_VERSION", "1"))
    strategy = _strategy(env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"))
    reshards = _true(env.get("FSDP_RESHARD_AFTER_FORWARD", "true")) if version == 2 else strategy != "SHARD_GRAD_OP"
    policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if policy not in POLICIES:
        raise _none_of("fsdp_auto_wrap_policy", policy, POLICIES)
    prefetch = env.get("FSDP_BACKWARD_PREFETCH", "NO_PREFETCH").upper()
    other = {
        f"fsdp_sharding_strategy: {strategy}": version == 1 and strategy not in STRATEGIES[:2],
        f"fsdp_auto_wrap_policy: {policy}": policy != POLICIES[0],
        "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP" in env,
        f"fsdp_backward_prefetch: {prefetch}": version == 1 and prefetch not in ("NO_PREFETCH", "BACKWARD_PRE"),
        "fsdp_forward_prefetch": version == 1 and _true(env.get("FSDP_FORWARD_PREFETCH", "false")),
        "fsdp_activation_checkpointing": _true(env.get("FSDP_ACTIVATION_CHECKPOINTING", "false")),
        "fsdp_ignored_modules": bool(env.get("FSDP_IGNORED_MODULES")),
    }
    return FsdpPlan(
        version=version,
        reshards=reshards,
        offloads=_true(env.get("FSDP_OFFLOAD_PARAMS", "false")),
        prefetches=version == 2 or prefetch == "BACKWARD_PRE",
        loads_once=_true(env.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")),
        launched=True,
        precision=env.get(PRECISION, "no"),
        unmodelled=tuple(name for name, is_other in other.items() if is_other),
    )


def _of_arguments(options: list[str], config: Mapping[str, Any], env: Mapping[str, str]) -> FsdpPlan:
    """Transformers' TrainingArguments._process_fsdp_args, and what accelerate makes of it."""
    settings = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    version = _version(settings.get("version", 1))
    prefetch = str(settings.get("backward_prefetch", "NO_PREFETCH")).upper()
    return FsdpPlan(
        version=version,
        # Version 1 does not look at `shard_grad_op`: accelerate takes the launcher's strategy or FULL_SHARD.
        reshards=_true(_word(settings.get("reshard_after_forward", "shard_grad_op" not in options)))
        if version == 2
        else _strategy(env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")) != "SHARD_GRAD_OP",
        offloads="offload" in options,
        prefetches=version == 2 or prefetch == "BACKWARD_PRE",
        loads_once=_true(_word(settings.get("cpu_ram_efficient_loading", False))) and SWITCH in env,
        launched=SWITCH in env,
        precision=env.get(PRECISION, ""),
        unmodelled=tuple(_other_arguments(options, settings, version, prefetch)),
    )


def _other_arguments(options: list[str], settings: Mapping[str, Any], version: int, prefetch: str) -> Iterator[str]:
    yield from (option for option in options if option not in ("full_shard", "shard_grad_op", "offload", "auto_wrap"))
    if "auto_wrap" not in options:
        yield "fsdp without auto_wrap"
    if version == 1 and prefetch not in ("NO_PREFETCH", "BACKWARD_PRE"):
        yield f"fsdp_config.backward_prefetch: {prefetch}"
    for name in ("min_num_params", "transformer_layer_cls_to_wrap", "forward_prefetch", "activation_checkpointing",
                 "xla", "limit_all_gathers"):  # fmt: skip
        if settings.get(name) not in (None, 0, False, [], "false"):
            yield f"fsdp_config.{name}"


def _version(value: Any) -> int:
    if str(value) not in ("1", "2"):
        raise UserError(phrase("`fsdp_version` is {value}, not 1 or 2", value=repr(value)))
    return int(value)


def _strategy(value: str) -> str:
    """A strategy by its name or its number, as accelerate takes both."""
    name = STRATEGIES[int(value) - 1] if value.isdigit() and 0 < int(value) <= len(STRATEGIES) else value.upper()
    if name not in STRATEGIES:
        raise _none_of("fsdp_sharding_strategy", value, STRATEGIES)
    return name


def _none_of(name: str, value: str, choices: Sequence[str]) -> UserError:
    listed = ", ".join(choices)
    return UserError(phrase("`{name}` is {value}, not one of {choices}", name=name, value=repr(value), choices=listed))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _true(value: str) -> bool:
    return value.strip().lower() in TRUE
