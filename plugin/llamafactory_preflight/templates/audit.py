"""Names what differs between two renderings of the same conversation. Pure: it is given both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llamafactory_preflight.templates.probe import Probe


# What holds of each topic once it is repaired.
REPAIRS = {
    "loss": "it lies on the answer and its stop token, after the prompt of the answer's mode",
    "earlier turns": "they are trained as they stand in a prompt when the model is served",
    "think tags": "they are found in every spelling, and a tag that is only mentioned is text",
    "tools": "the list of tools, calls and results are written as the model knows them",
    "special tokens": "what only looks like one in a text stays text",
    "chat and API": "they send the prompt that the model was trained on",
    "stop tokens": "a generation ends at <|im_end|> and at <|endoftext|>",
}


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
        topic: Which of the repairs it belongs to.
        message: What differs, as a sentence without a final period.
    """

    id: str
    topic: str
    message: str


def differences(renderings: Iterable[tuple[Probe, Rendering, Rendering]]) -> Iterator[Difference]:
    """Compares LLaMA-Factory's renderings with the official ones.

    Args:
        renderings: Of each probe LLaMA-Factory's and the official one.
    """
    stops_differ = False
    for probe, factory, official in renderings:
        if what := _difference(factory, official, is_served=probe.is_served):
            yield Difference(id=probe.id, topic=probe.topic, message=f"{probe.about}: {what}")
        stops_differ |= not factory.failure and not official.stops <= factory.stops
    if stops_differ:
        yield Difference(
            id="stop-tokens",
            topic="stop tokens",
            message="generation: LLaMA-Factory stops at fewer tokens than the official configuration",
        )


def repairs(found: Iterable[Difference]) -> list[str]:
    """What is repaired, one line for each topic."""
    topics = {difference.topic for difference in found}
    return [f"{topic}: {words}" for topic, words in REPAIRS.items() if topic in topics]


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
