"""The plugin's switches: environment variables, because LLaMA-Factory refuses YAML keys that it does not know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, cast

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.phrases import phrase


PREFLIGHT_VARIABLE = "LLAMAFACTORY_PREFLIGHT"
TEMPLATE_VARIABLE = "LLAMAFACTORY_TEMPLATE"
ALLOW_VARIABLE = "LLAMAFACTORY_PREFLIGHT_ALLOW"
SNAPSHOT_VARIABLE = "LLAMAFACTORY_PREFLIGHT_SNAPSHOT"
GPU_VARIABLE = "LLAMAFACTORY_PREFLIGHT_GPU"
TURNS_VARIABLE = "LLAMAFACTORY_TEMPLATE_TURNS"
LOSS_VARIABLE = "LLAMAFACTORY_TEMPLATE_LOSS"
EMPTY_THINK_VARIABLE = "LLAMAFACTORY_TEMPLATE_EMPTY_THINK"

VARIABLES = (
    *(PREFLIGHT_VARIABLE, TEMPLATE_VARIABLE, ALLOW_VARIABLE, SNAPSHOT_VARIABLE, GPU_VARIABLE),
    *(TURNS_VARIABLE, LOSS_VARIABLE, EMPTY_THINK_VARIABLE),
)

Mode = Literal["block", "warn", "fit", "off"]
TemplateMode = Literal["fix", "warn", "off"]
ALLOWABLE = ("quantization", "cutoff", "precision", "method", "optimizer")
MODES = ("block", "warn", "fit", "off")
TEMPLATE_MODES = ("fix", "warn", "off")
Turns = Literal["split", "last", "concat"]
Loss = Literal["all", "answer"]
EmptyThink = Literal["mask", "train"]
TURNS = ("split", "last", "concat")
LOSSES = ("all", "answer")
EMPTY_THINKS = ("mask", "train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the user asked of the plugin.

    Attributes:
        mode: `block` stops a run that cannot fit, `warn` only says so, `fit` may change the run, `off` does nothing.
        template: `fix` repairs the chat template, `warn` only says what differs, `off` does nothing.
        allow: What `fit` may change too, as `--allow` names it.
        snapshot: Number of the optimizer step whose memory is recorded, or None.
        gpu: Another card to plan for, as `--gpu` takes it, or None for the one in this machine.
        turns: Of a conversation that is trained otherwise than it is served, `split` makes one sample per answer,
            `last` trains the last answer only, `concat` trains all of them in one text as LLaMA-Factory does.
        loss: `answer` puts no loss on reasoning.
        empty_think: `train` puts the empty think block of an answer without reasoning under loss.
    """

    mode: Mode = "block"
    template: TemplateMode = "fix"
    allow: frozenset[str] = frozenset()
    snapshot: int | None = None
    gpu: str | None = None
    turns: Turns = "split"
    loss: Loss = "all"
    empty_think: EmptyThink = "mask"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads the switches; an empty variable counts as not set.

        Raises:
            UserError: A switch has a value that does not exist.
        """
        env = os.environ if environ is None else environ
        return cls(
            mode=cast(Mode, _choice(env, PREFLIGHT_VARIABLE, MODES)),
            template=cast(TemplateMode, _choice(env, TEMPLATE_VARIABLE, TEMPLATE_MODES)),
            allow=allowed(env.get(ALLOW_VARIABLE, ""), where=ALLOW_VARIABLE),
            snapshot=_step(env.get(SNAPSHOT_VARIABLE, "").strip()),
            gpu=env.get(GPU_VARIABLE, "").strip() or None,
            turns=cast(Turns, _choice(env, TURNS_VARIABLE, TURNS)),
            loss=cast(Loss, _choice(env, LOSS_VARIABLE, LOSSES)),
            empty_think=cast(EmptyThink, _choice(env, EMPTY_THINK_VARIABLE, EMPTY_THINKS)),
        )


def unset_faulty(environ: MutableMapping[str, str]) -> Iterator[UserError]:
    """Takes out each switch whose value does not exist, so that the others count, here and in children.

    Yields:
        What was wrong with it.
    """
    for variable in VARIABLES:
        try:
            Settings.from_environment({variable: environ.get(variable, "")})
        except UserError as error:
            del environ[variable]
            yield error


def allowed(text: str, *, where: str = "--allow") -> frozenset[str]:
    """Reads a list of names, separated by commas.

    Raises:
        UserError: There is no such name.
    """
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(names - set(ALLOWABLE))
    if unknown:
        raise UserError(
            f"{unknown[0]!r} cannot be allowed", where=where, next_step=f"There are {', '.join(ALLOWABLE)}"
        )
    return names


def is_enabled(environ: Mapping[str, str], variable: str) -> bool:
    """Whether one of LLaMA-Factory's own switches is on, by its `is_env_enabled`."""
    return environ.get(variable, "").lower() in {"true", "y", "1"}


def _step(text: str) -> int | None:
    if text and (not text.isdecimal() or int(text) < 1):
        raise UserError(
            phrase("{variable}={text} is not the number of a step", variable=SNAPSHOT_VARIABLE, text=text),
            next_step="Set it to 1 or more",
        )
    return int(text) if text else None


def _choice(env: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    value = env.get(variable, "").strip().lower() or choices[0]
    if value not in choices:
        raise UserError(
            phrase("{variable}={value} is not a mode", variable=variable, value=env[variable]),
            next_step=phrase("Set it to one of {choices}, or unset it", choices=", ".join(choices)),
        )
    return value
