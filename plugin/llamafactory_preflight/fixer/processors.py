"""LLaMA-Factory's processors of preference data, with one prompt and one mode for the answers that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamafactory.data.processor import (
    FeedbackDatasetProcessor,
    PackedSupervisedDatasetProcessor,
    PairwiseDatasetProcessor,
    PretrainDatasetProcessor,
)

from llamafactory_preflight.fixer import session
from llamafactory_preflight.fixer.template import OfficialTemplate, Pair
from llamafactory_preflight.templates.families import END_OF_TEXT
from llamafactory_preflight.templates.messages import Message


IGNORE_INDEX = -100
# Columns beside packed samples, in the first pack of each batch; nothing else comes back from a worker or a cache.
SEEN, KEPT = "_num_seen", "_num_kept"


@dataclass
class OfficialPacks(PackedSupervisedDatasetProcessor):  # type: ignore[misc]
    """Packing: a sample that does not fit is left out, and how many were is told.

    Attributes:
        num_kept: Samples of a batch that went into a pack.
    """

    template: OfficialTemplate
    num_kept: int = 0

    def preprocess_dataset(self, examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """LLaMA-Factory's own, with two columns more."""
        self.num_kept = 0
        packs: dict[str, list[Any]] = super().preprocess_dataset(examples)
        zeros = [0] * (len(packs.get("input_ids", [])) - 1)
        if packs.get("input_ids"):
            packs[SEEN], packs[KEPT] = [len(examples["_prompt"]), *zeros], [self.num_kept, *zeros]
        return packs

    def _encode_data_example(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        ids, labels = super()._encode_data_example(*args, **kwargs)
        self.num_kept += bool(ids)
        if ids:
            return ids, labels
        too_long = [IGNORE_INDEX] * (self.data_args.cutoff_len + 1)  # so that LLaMA-Factory packs nothing for it
        return too_long, too_long


@dataclass
class OfficialPairs(PairwiseDatasetProcessor):  # type: ignore[misc]
    """DPO and reward models: both answers in the mode of the chosen one."""

    template: OfficialTemplate

    def _encode_data_example(
        self,
        prompt: list[Message],
        response: list[Message],
        system: str | None,
        tools: str | None,
        images: list[Any],
        videos: list[Any],
        audios: list[Any],
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        prompt_ids, answers = _encoded(self, prompt, response[:2], system, tools, (images, videos, audios))
        (chosen, chosen_labels), (rejected, rejected_labels) = (_labelled(prompt_ids, *pair) for pair in answers)
        return chosen, chosen_labels, rejected, rejected_labels


@dataclass
class OfficialFeedback(FeedbackDatasetProcessor):  # type: ignore[misc]
    """KTO: the answer and the one that is borrowed for the reference point, both in the answer's own mode."""

    template: OfficialTemplate

    def _encode_data_example(
        self,
        prompt: list[Message],
        response: list[Message],
        kl_response: list[Message],
        system: str | None,
        tools: str | None,
        images: list[Any],
        videos: list[Any],
        audios: list[Any],
    ) -> tuple[list[int], list[int], list[int], list[int], bool]:
        is_desired = bool(response[0]["content"])
        answer = response[0] if is_desired else response[1]
        borrowed = kl_response[0] if kl_response[0]["content"] else kl_response[1]
        prompt_ids, answers = _encoded(self, prompt, [answer, borrowed], system, tools, (images, videos, audios))
        (ids, labels), (kl_ids, kl_labels) = (_labelled(prompt_ids, *pair) for pair in answers)
        return ids, labels, kl_ids, kl_labels, is_desired


@dataclass
class Documents(PretrainDatasetProcessor):  # type: ignore[misc]
    """Pretraining: Qwen ends a document with its end of text, not with the end of a turn."""

    template: OfficialTemplate

    def preprocess_dataset(self, examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """LLaMA-Factory's own, with another token at the end of each document, and without those that have no text."""
        documents = [prompt for prompt in examples["_prompt"] if prompt and prompt[0]["content"] is not None]
        if missing := len(examples["_prompt"]) - len(documents):
            session.say(f"{missing} of {len(examples['_prompt'])} documents in a row have no text and are left out")
        usual = self.tokenizer.eos_token
        self.tokenizer.eos_token = END_OF_TEXT
        try:
            inputs: dict[str, list[Any]] = super().preprocess_dataset(examples | {"_prompt": documents})
        finally:
            self.tokenizer.eos_token = usual
        return inputs


def _encoded(
    processor: Any,
    prompt: list[Message],
    answers: list[Message],
    system: str | None,
    tools: str | None,
    media: tuple[list[Any], list[Any], list[Any]],
) -> tuple[list[int], list[Pair]]:
    template, tokenizer, plugin = processor.template, processor.tokenizer, processor.template.mm_plugin
    shown = plugin.process_messages([*prompt, answers[0]], *media, processor.processor)[:-1]
    prompt_ids, pairs = template.encode_answers(tokenizer, shown, answers, system, tools)
    prompt_ids, _ = plugin.process_token_ids(prompt_ids, None, *media, tokenizer, processor.processor)
    shorter = template.fitted(tokenizer, prompt_ids, [[*masked, *trained] for masked, trained in pairs])
    if shorter is None:  # a row with nothing to learn, which is counted and left out once all are made
        return [], [([], []) for _ in pairs]
    return shorter, pairs


def _labelled(prompt: list[int], masked: list[int], trained: list[int]) -> Pair:
    return prompt + masked + trained, [IGNORE_INDEX] * (len(prompt) + len(masked)) + trained
