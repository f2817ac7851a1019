"""Names what differs between two renderings of the same conversation. Pure: it is given both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llamafactory_preflight.templates.probe import Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """One rendering of a probe's last answer.

    Attributes:
        prompt: Token ids without loss.
        answer: Token ids with loss, without a line break after the stop token.
        text: Both as text.
        stops: Ids that end a generation.
        failure: Why there is no rendering, or an empty string.
    """

    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    text: str = ""
    stops: frozenset[int] = frozenset()
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A probe that LLaMA-Factory renders otherwise.

    Attributes:
        id: Name of the finding.
        message: What differs, as a sentence without a final period.
    """

    id: str
    message: str


def differences(renderings: Iterable[tuple[Probe, Rendering, Rendering]]) -> Iterator[Difference]:
    """Compares LLaMA-Factory's renderings with the official ones.

    Args:
        renderings: Of each probe LLaMA-Factory's and the official one.
    """
    stops_differ = False
    for probe, factory, official in renderings:
        if what := _difference(factory, official, is_served=probe.is_served):
            yield Difference(id=probe.id, message=f"{probe.about}: {what}")
        stops_differ |= not factory.failure and not official.stops <= factory.stops
    if stops_differ:
        yield Difference(
            id="stop-tokens", message="generation: LLaMA-Factory stops at fewer tokens than the official configuration"
        )


def _difference(factory: Rendering, official: Rendering, *, is_served: bool) -> str:
    if factory.failure:
        return f"LLaMA-Factory cannot render it ({factory.failure})"
    if is_served:
        return "" if factory.prompt == official.prompt else "LLaMA-Factory's prompt is not the official one"
    if (factory.prompt, factory.answer) == (official.prompt, official.answer):
        return ""
    if factory.text != official.text:
        return "LLaMA-Factory's text is not the official one"
    if len(factory.prompt) != len(official.prompt):
        return "LLaMA-Factory's loss does not lie on the answer"
    return "LLaMA-Factory's text is the official one, its tokens are others"
