"""What the rows of a data set lack that LLaMA-Factory reads of each, where its files are JSON on this machine.

Source: llamafactory/data/parser.py (DatasetAttr), loader.py (_get_merged_dataset) and converter.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from llamafactory_preflight.arguments import paths
from llamafactory_preflight.data import rows
from llamafactory_preflight.findings.names import are_listed_here, own_file
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


PAIRED = ("dpo", "rm")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
MESSAGES = "conversations"
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "observation_tag": "observation"}
"""LLaMA-Factory's names where `dataset_info.json` gives none; where it has `columns` or `tags`, only those in it."""
MEDIA = ("images", "videos", "audios")
ASKED = ("instruction", "prompt", "question", "query", "input")
ANSWERED = ("output", "response", "answer", "completion", "chosen")
"""Names that people give to columns, for a proposal."""
CHAT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
             "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call"}  # fmt: skip
MOST_SHOWN = 8


def data_rows(run: RunDescription, *, trains: bool) -> Iterator[Finding]:
    """Data that LLaMA-Factory would load and then end with, after the tokenizer and before the weights.

    Args:
        run: The run, with its `dataset_dir` where the plugin found it.
        trains: Whether it starts here and now; otherwise its data may be on the machine that it is planned for.
    """
    if not are_listed_here(run):
        return
    info = Path(run.dataset_dir) / paths.DATA_INFO
    known = paths.datasets_in(info.parent)
    for name in dict.fromkeys((*run.dataset, *run.eval_dataset)):
        described = known.get(name)
        if not isinstance(described, dict):
            continue
        message = _stage(run, described, name, info) or _file(run, described, name, info)
        if message:
            yield Finding(id="data-rows", severity="error" if trains else "warning", message=message)


def _stage(run: RunDescription, described: Mapping[str, Any], name: str, info: Path) -> str | None:
    """Whether the data set is of the kind that the stage takes."""
    paired = described.get("ranking", False)
    if run.stage in PAIRED and paired is False:
        return phrase(
            "`{name}` is no data set of preferences, which `stage: {stage}` trains on. Name another one or, if it is, "
            'write "ranking": true and the columns `chosen` and `rejected` into {file}.',
            name=name,
            stage=run.stage,
            file=info,
        )
    if run.stage not in PAIRED and paired is True:
        return phrase(
            "`{name}` is a data set of preferences, which `stage: {stage}` does not take. Set `stage` to dpo or rm, "
            "or name another data set.",
            name=name,
            stage=run.stage,
        )
    if run.stage == "kto" and not _columns(described).get("kto_tag"):
        return phrase(
            "`{name}` marks no answers as good or bad, which `stage: kto` trains on. Write the column that does, of "
            "true and false, as `kto_tag` into {file}.",
            name=name,
            file=info,
        )
    return None


def _file(run: RunDescription, described: Mapping[str, Any], name: str, info: Path) -> str | None:
    """Whether the file has the columns that are read."""
    file_name = own_file(described)
    table = rows.table(info.parent / file_name) if file_name is not None else None
    if file_name is None or table is None:
        return None
    file = info.parent / file_name
    if not table.num_rows:
        return phrase("{file}, which `{name}` names, holds no rows.", file=file, name=name)
    missing = [column for column in _read_of_all(described) if column not in table.columns]
    if missing:
        shown = ", ".join(sorted(table.columns)[:MOST_SHOWN])
        text = phrase(
            "{rows} has no column `{column}`, which LLaMA-Factory reads for `{name}`. It has {columns}.",
            rows=file,
            column=missing[0],
            name=name,
            columns=shown,
        )
        return _with_entry(text, described, _proposed(table, run.stage), table.columns, name, info)
    items = table.items.get(str(_messages(described)), {})
    if described.get("formatting", "alpaca") == "alpaca" or not items:
        return None
    tags = _tags(described)
    lost = [tags[key] for key in ("role_tag", "content_tag") if tags[key] not in items]
    if lost:
        text = phrase(
            "The messages in {rows} have no `{tag}`, which LLaMA-Factory reads for `{name}`. They have {tags}.",
            rows=file,
            tag=lost[0],
            name=name,
            tags=", ".join(sorted(items)[:MOST_SHOWN]),
        )
        return _with_entry(text, described, _proposed(table, run.stage), table.columns, name, info)
    begin = {tags["user_tag"], tags["observation_tag"]}
    roles = items[str(tags["role_tag"])]
    if len(roles) < rows.MOST_WORDS and not begin & roles:
        shown = ", ".join(sorted(roles)[:MOST_SHOWN])
        text = (
            phrase(
                "No message in {rows} is from `{tag}`, with which LLaMA-Factory has a conversation of `{name}` begin. "
                "They are from {tags}.",
                rows=file,
                tag=tags["user_tag"],
                name=name,
                tags=shown,
            )
            if tags["user_tag"]
            else phrase(
                "`{name}` names no `user_tag` among its `tags`. The messages in {rows} are from {tags}.",
                name=name,
                rows=file,
                tags=shown,
            )
        )
        return _with_entry(text, described, _proposed(table, run.stage), table.columns, name, info)
    return None


def _tags(described: Mapping[str, Any]) -> Mapping[str, Any]:
    tags = described.get("tags")
    return {key: tags.get(key) for key in TAGS} if isinstance(tags, dict) else TAGS


def _read_of_all(described: Mapping[str, Any]) -> Iterator[str]:
    """The columns that the converter reads in every row, whatever the row holds."""
    given = _columns(described)
    keys = [*MEDIA, "kto_tag"]
    if described.get("formatting", "alpaca") == "alpaca":
        names = given if "columns" in described else ALPACA
        keys += ["history", "prompt", "query", "system", "tools"]
        keys += [] if given.get("kto_tag") or described.get("ranking") else ["response"]
    else:
        names = given if "columns" in described else {"messages": MESSAGES}
        keys.insert(0, "messages")
    yield from (str(names[key]) for key in keys if names.get(key))


def _columns(described: Mapping[str, Any]) -> Mapping[str, Any]:
    columns = described.get("columns")
    return columns if isinstance(columns, dict) else {}


def _messages(described: Mapping[str, Any]) -> object:
    return _columns(described).get("messages") if "columns" in described else MESSAGES


def _with_entry(
    text: str,
    described: Mapping[str, Any],
    entry: Mapping[str, Any] | None,
    columns: Collection[str],
    name: str,
    info: Path,
) -> str:
    """The sentence with an entry for `dataset_info.json` that fits the rows, where one can be told."""
    if entry is None:
        return phrase("{text} Write into {file} which of them it is to read.", text=text, file=info)
    kept = {key: column for key, column in _columns(described).items() if column in columns}
    entry = {"file_name": described["file_name"]} | dict(entry) | {"columns": kept | entry["columns"]}
    written = json.dumps({name: entry}, ensure_ascii=False)[1:-1]
    return phrase("{text} An entry in {file} that fits: {entry}", text=text, file=info, entry=written)


def _proposed(table: rows.Table, stage: str) -> Mapping[str, Any] | None:
    if stage in (*PAIRED, "kto"):
        return None
    if stage == "pt" and "text" in table.columns:
        return {"columns": {"prompt": "text"}}
    for column, names in table.items.items():
        if {"role", "content"} <= names.keys():
            return {"formatting": "sharegpt", "columns": {"messages": column}, "tags": CHAT_TAGS}
        if {TAGS["role_tag"], TAGS["content_tag"]} <= names.keys():
            return {"formatting": "sharegpt", "columns": {"messages": column}}
    asked = [column for column in ASKED if column in table.columns]
    answered = [column for column in ANSWERED if column in table.columns]
    if not asked or not answered:
        return None
    return {"columns": dict(zip(("prompt", "query"), asked, strict=False)) | {"response": answered[0]}}
