"""LLaMA-Factory's data steps as its workflows call them, and what the template tests share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from template_matrix import answer


@pytest.fixture
def factory(tokenizer: Any, chat_templates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """LLaMA-Factory with one model of the family: `factory.template(...)`, `factory.rows(records, ...)`."""
    from llamafactory_preflight.fixer import session

    monkeypatch.setattr(session, "CURRENT", session.Session())  # as a new process has it
    monkeypatch.setattr(session, "SAID", [])
    monkeypatch.setattr(tokenizer, "chat_template", chat_templates["qwen3"])
    return Factory(tokenizer)


class Factory:
    """Calls LLaMA-Factory as its workflows do."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def template(self, name: str | None = "qwen3", **options: Any) -> Any:
        from llamafactory.data import get_template_and_fix_tokenizer
        from llamafactory.hparams import DataArguments

        self.arguments = DataArguments(template=name, **options)
        return get_template_and_fix_tokenizer(self.tokenizer, self.arguments)

    def rows(
        self,
        records: list[dict[str, Any]],
        *,
        stage: str = "sft",
        generate: bool = False,
        columns: dict[str, Any] | None = None,
        formatting: str = "sharegpt",
        streaming: bool = False,
        processor: Any = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        import datasets
        from llamafactory.data import loader
        from llamafactory.data.converter import align_dataset
        from llamafactory.data.parser import DatasetAttr

        template = self.template(**options)
        self.used = template
        attr = DatasetAttr("file", "x", formatting=formatting)
        vars(attr).update(columns or {})
        if any("tools" in record for record in records):
            attr.tools = "tools"
        self.arguments.streaming = streaming
        training = SimpleNamespace(local_process_index=0, should_log=False, predict_with_generate=generate)
        data = datasets.Dataset.from_list(records)
        data = data.to_iterable_dataset() if streaming else data
        aligned = align_dataset(data, attr, self.arguments, training)
        if options.get("val_size"):
            aligned = loader.split_dataset(aligned, None, self.arguments, seed=42)[0]["train"]
        made = loader._get_preprocessed_dataset(
            aligned, self.arguments, training, stage, template, self.tokenizer, processor, is_eval=generate
        )
        return list(made)

    @property
    def said(self) -> str:
        """What the fixer said in this test."""
        from llamafactory_preflight.fixer import session

        return "\n".join(session.SAID)

    def text(self, ids: list[int]) -> str:
        decoded: str = self.tokenizer.decode([token for token in ids if token >= 0])
        return decoded


THINK_PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
NO_THINK_PROMPT = THINK_PROMPT + "<think>\n\n</think>\n\n"
PLAIN, REASONED = answer("a"), answer("a", "r")


def pair(chosen: str, rejected: str) -> dict[str, Any]:
    turns = {"chosen": {"from": "gpt", "value": chosen}, "rejected": {"from": "gpt", "value": rejected}}
    return {"conversations": [{"from": "human", "value": "q"}], **turns}


RANKING = {"ranking": True, "chosen": "chosen", "rejected": "rejected"}
WITH, WITHOUT = "<think>\nr\n</think>\n\na", "b"
OPENAI = {
    **{"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    **{"observation_tag": "tool", "function_tag": "function", "system_tag": "system", "messages": "messages"},
}
