"""A template of LLaMA-Factory that renders with the model's own chat template and splits as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llamafactory.data.template import Template

from llamafactory_preflight.fixer.cut import Anchors, cut_prompt
from llamafactory_preflight.fixer.render import Style, encode, escape, pair_texts, split_reasoning, system_texts
from llamafactory_preflight.fixer.rules import rules
from llamafactory_preflight.settings import EmptyThink, Turns
from llamafactory_preflight.templates.families import Family, Mode
from llamafactory_preflight.templates.messages import ANSWERS, Message, num_queries, to_official, to_tools
from llamafactory_preflight.templates.ollama import modelfile
from llamafactory_preflight.templates.thinking import (
    asked_for,
    inference_mode,
    is_stable,
    split_answer,
    training_mode,
)


Pair = tuple[list[int], list[int]]


@dataclass
class OfficialTemplate(Template):  # type: ignore[misc]
    """Says what the model's chat template says; all fields of LLaMA-Factory's template are taken over.

    Attributes:
        style: How to render.
        default_mode: Mode of a prompt for which nobody asked for one.
        empty_think: Whether an answer without reasoning is trained after the thinking prompt.
        turns: What of a conversation becomes a sample.
        cutoff_len: Most tokens of a sample, or None for a prompt that must stay whole.
        purpose: `train` looks at the answer to choose its mode, `predict` does not.
        rules: Hash of the code that renders; see `fixer.rules`.
    """

    style: Style
    default_mode: Mode
    empty_think: EmptyThink
    turns: Turns
    cutoff_len: int | None
    purpose: Literal["train", "predict"]
    rules: str

    def encode_oneturn(
        self, tokenizer: Any, messages: list[Message], system: str | None = None, tools: str | None = None
    ) -> Pair:
        """Prompt and last answer; the answer chooses the mode only if it is to be trained."""
        conversation = self._conversation(messages, system, tools)
        prompt, answer = self._last_pair(tokenizer, conversation, self._mode(conversation.last))
        if self.cutoff_len is None:
            return prompt, answer
        limit = self.cutoff_len - 2  # the same whatever the label is: a prediction does not know it
        shorter = cut_prompt(prompt, limit, Anchors.of(tokenizer)) or prompt[-limit:]
        return shorter, answer[: self.cutoff_len - 1 - len(shorter)]

    def encode_multiturn(
        self,
        tokenizer: Any,
        messages: list[Message],
        system: str | None = None,
        tools: str | None = None,
        discarding_history_cot: bool = False,
    ) -> list[Pair]:
        """One pair for each answer that one text can serve, or the last one; none if not even that fits."""
        conversation = self._conversation(messages, system, tools)
        if self.turns == "last" or discarding_history_cot or not (self.turns == "concat" or self._stable(messages)):
            pairs: Iterator[Pair] = iter([self._last_pair(tokenizer, conversation, self._mode(conversation.last))])
        else:
            pairs = self._all_pairs(tokenizer, conversation)
        return self._that_fit(tokenizer, pairs)

    def encode_answers(
        self, tokenizer: Any, prompt: list[Message], answers: Sequence[Message], system: str | None, tools: str | None
    ) -> tuple[list[int], list[Pair]]:
        """One prompt and several answers to it, in the mode of the first; of each what is shown, what trained."""
        conversations = [self._conversation([*prompt, answer], system, tools) for answer in answers]
        mode = self._mode(conversations[0].last)
        whole = replace(self.style, loss_on_reasoning=True)
        texts = [
            pair_texts(whole, talk.official[:-1], talk.last, talk.tools, mode=mode, follows=False)
            for talk in conversations
        ]
        parts = [split_reasoning(self.style, text, mode=mode) for _, text in texts]
        prompt_ids, *encoded = encode(self.style, tokenizer, [texts[0][0], *(text for pair in parts for text in pair)])
        return prompt_ids, list(zip(encoded[::2], encoded[1::2], strict=True))

    def stable_answers(self, messages: list[Message]) -> int:
        """How many of the first answers one sample serves; later ones each need a sample of their own."""
        ends = [end for end, message in enumerate(messages, 1) if message["role"] in ANSWERS]
        stable = 0
        while stable < len(ends) and self._stable(messages[: ends[stable]]):
            stable += 1
        return stable

    def answer_modes(self, messages: list[Message]) -> list[Mode]:
        """The mode in which each answer is trained."""
        return [self._training_mode(message["content"]) for message in messages if message["role"] in ANSWERS]

    def fitted(self, tokenizer: Any, prompt: list[int], answers: Sequence[list[int]]) -> list[int] | None:
        """The prompt, shortened so that each of the answers fits whole; None if none of it would be left."""
        if self.cutoff_len is None:
            return prompt
        # One token less than the limit: at exactly the limit, LLaMA-Factory's rounding may cut a stop token off.
        return cut_prompt(prompt, self.cutoff_len - 1 - max(map(len, answers)), Anchors.of(tokenizer))

    def get_stop_token_ids(self, tokenizer: Any) -> list[int]:
        """End of turn and end of text, as the official generation configs have them."""
        ids = [
            *super().get_stop_token_ids(tokenizer),
            *tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        ]
        return list(dict.fromkeys(ids))

    def get_ollama_modelfile(self, tokenizer: Any) -> str:
        """With thinking and tools."""
        stops = tokenizer.convert_ids_to_tokens(self.get_stop_token_ids(tokenizer))
        return modelfile(self.style.family, mode=self.default_mode, stops=stops, texts=system_texts(self.style))

    def _conversation(self, messages: list[Message], system: str | None, tools: str | None) -> _Conversation:
        media = self.style.media_tokens  # those in a text are real by now
        special = tuple(token for token in self.style.special_tokens if token not in media)
        escaped = [
            {"role": message["role"], "content": escape(self._content(message), special)} for message in messages
        ]
        official = to_official(
            escaped, family=self.style.family, system=escape(system or self.default_system, special) or None
        )
        return _Conversation(official=official, tools=to_tools(escape(tools, special) if tools else None))

    def _content(self, message: Message) -> str:
        content: str = message["content"] or ""
        is_dataset = self.purpose == "train" or self.cutoff_len is not None  # in a chat, history is what it is
        strips = is_dataset and message["role"] in ANSWERS and self._asked() is False
        return split_answer(content).text if strips else content

    def _asked(self) -> bool | None:
        return asked_for(self.enable_thinking)  # read each time: the chat page sets it while the model is loaded

    def _mode(self, answer: Message) -> Mode:
        if self.purpose == "predict":
            return inference_mode(self.style.family, asked=self._asked(), default=self.default_mode)
        return training_mode(
            self.style.family,
            has_reasoning=bool(answer.get("reasoning_content")),
            asked=self._asked(),
            empty_think=self.empty_think,
        )

    def _training_mode(self, content: str | None) -> Mode:
        reasoning = split_answer(content or "").reasoning
        return training_mode(
            self.style.family, has_reasoning=bool(reasoning), asked=self._asked(), empty_think=self.empty_think
        )

    def _stable(self, messages: list[Message]) -> bool:
        contents = [message["content"] or "" for message in messages if message["role"] in ANSWERS]
        return len(contents) < 2 or is_stable(
            self.style.family,
            num_queries=num_queries(messages),
            modes=[self._training_mode(content) for content in contents],
            has_reasoning=[
                bool(split_answer(content).reasoning) and self._asked() is not False for content in contents
            ],
            preserve=self.style.preserve,
        )

    def _last_pair(self, tokenizer: Any, conversation: _Conversation, mode: Mode) -> Pair:
        before, tools = conversation.official[:-1], conversation.tools
        return self._pair(tokenizer, before, conversation.last, tools, mode=mode, follows=False)

    def _all_pairs(self, tokenizer: Any, conversation: _Conversation) -> Iterator[Pair]:
        start = 0
        for position, message in enumerate(conversation.official):
            if message["role"] == "assistant":
                before, tools = conversation.official[start:position], None if start else conversation.tools
                yield self._pair(tokenizer, before, message, tools, mode=self._mode(message), follows=start > 0)
                start = position + 1

    def _pair(
        self, tokenizer: Any, before: list[Message], answer: Message, tools: Any, *, mode: Mode, follows: bool
    ) -> Pair:
        texts = pair_texts(self.style, before, answer, tools, mode=mode, follows=follows)
        prompt, trained = encode(self.style, tokenizer, texts)
        return prompt, trained

    def _that_fit(self, tokenizer: Any, pairs: Iterator[Pair]) -> list[Pair]:
        kept: list[Pair] = []
        left = None if self.cutoff_len is None else self.cutoff_len - 1
        for prompt, answer in pairs:
            if left is not None and len(prompt) + len(answer) > left:
                shorter = None if kept else self.fitted(tokenizer, prompt, [answer])
                return [(shorter, answer)] if shorter else kept
            kept.append((prompt, answer))
            left = None if left is None else left - len(prompt) - len(answer)
        return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversation:
    official: list[Message]
    tools: list[Message] | None

    @property
    def last(self) -> Message:
        return self.official[-1]


def make(base: Template, **ours: Any) -> OfficialTemplate:
    """A template with the fields of LLaMA-Factory's and ours; `base` is left alone."""
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return OfficialTemplate(**fields, rules=rules(), **ours)


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """What the tokenizer treats as special, longest first."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted(added, key=lambda token: (-len(token), token)))


def style_for(tokenizer: Any, family: Family, chat_template: str, **options: bool) -> Style:
    """How to render for this tokenizer."""
    return Style(family=family, chat_template=chat_template, special_tokens=special_tokens(tokenizer), **options)
