"""Names that stand for something elsewhere: of a chat template, and of data sets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path

from llamafactory_preflight.arguments import paths, template_names
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription


SHOWN_NAMES = 6
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of `dataset_info.json`. Source: llamafactory/data/parser.py (get_dataset_list)."""
NEAR = 0.5
"""How alike names are that may have been meant, from 0 to 1; difflib's 0.6 misses `nothink` for `qwen3_nothink`."""


def template(run: RunDescription) -> Iterator[Finding]:
    """LLaMA-Factory looks its templates up by name, once the tokenizer is loaded."""
    known = template_names.known()
    if run.template is None or not known or run.template in known:
        return
    near = get_close_matches(run.template, sorted(known), n=SHOWN_NAMES, cutoff=NEAR)
    yield Finding(
        id="template-unknown",
        severity="error",
        message=phrase(
            "LLaMA-Factory has no `template: {name}`. The nearest are {near}; `llamafactory-cli template` shows what "
            "one makes of your data.",
            name=run.template,
            near=", ".join(near),
        )
        if near
        else phrase("LLaMA-Factory has no `template: {name}`. Its README lists them.", name=run.template),
        set={"template": near[0]} if near else None,
    )


def data_sets(run: RunDescription, *, trains: bool) -> Iterator[Finding]:
    """LLaMA-Factory looks data sets up in a list beside them, after the tokenizer and before the weights.

    Args:
        run: The run, with its `dataset_dir` where the plugin found it.
        trains: Whether it starts here and now; otherwise its data may be on the machine that it is planned for.
    """
    if not are_listed_here(run):
        return
    file = Path(run.dataset_dir) / paths.DATA_INFO
    known = paths.datasets_in(file.parent)
    for key, names in (("dataset", run.dataset), ("eval_dataset", run.eval_dataset)):
        missing = [name for name in names if name not in known]
        if not missing:
            continue
        if not file.is_file():
            yield Finding(
                id="data-list-missing",
                severity="error" if trains else "warning",
                message=_no_list(file, key, missing[0]),
            )
            return
        for name in missing:
            yield Finding(id="data-set-unknown", severity="error", message=_unknown(file, key, name, known))
    for name in dict.fromkeys((*run.dataset, *run.eval_dataset)):
        rows = own_file(known.get(name))
        if rows is not None and trains and _is_empty_folder(file.parent / rows):
            yield Finding(
                id="data-folder-empty",
                severity="error",
                message=phrase(
                    "{rows} is empty, where {file} says that `{name}` is. Put its files there.",
                    rows=file.parent / rows,
                    file=file,
                    name=name,
                ),
            )
        if rows is not None and not (file.parent / rows).exists():
            yield Finding(
                id="data-file-missing",
                severity="error" if trains else "warning",
                message=phrase(
                    "{rows} does not exist, where {file} says that `{name}` is. Put it there, or correct its "
                    "`file_name`.",
                    rows=file.parent / rows,
                    file=file,
                    name=name,
                ),
            )


def _is_empty_folder(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:
        return False


def own_file(described: object) -> str | None:
    """The file or folder of a data set that is on this machine; every other place counts before it."""
    if not isinstance(described, dict) or any(place in described for place in ELSEWHERE):
        return None
    name = described.get("file_name")
    return name if isinstance(name, str) else None


def _no_list(file: Path, key: str, name: str) -> str:
    pack = paths.pack_folder()
    ours = ", ".join(paths.datasets_in(pack / "presets" / "data")) if pack else ""
    return phrase(
        "{file} does not exist, where LLaMA-Factory looks for `{key}: {name}`. Set `dataset_dir` to the folder that "
        "holds it, or name a data set of this pack: {ours}.",
        file=file,
        key=key,
        name=name,
        ours=ours,
    )


def _unknown(file: Path, key: str, name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, sorted(known), n=SHOWN_NAMES, cutoff=NEAR) or sorted(known)[:SHOWN_NAMES]
    if not near:
        return phrase("{file}, where LLaMA-Factory looks for `{key}: {name}`, lists no data sets.",
                      file=file, key=key, name=name)  # fmt: skip
    return phrase(
        "{file} has no `{name}`, which `{key}` names. It has {near}: name one of those, or add yours to the file.",
        file=file,
        key=key,
        name=name,
        near=", ".join(near),
    )


def are_remote(run: RunDescription) -> bool:
    """Whether some of a run's data comes from a hub."""
    if _are_listed_remotely(run):
        return True
    known = paths.datasets_in(Path(run.dataset_dir))
    described = [known.get(name) for name in (*run.dataset, *run.eval_dataset)]
    return any(key.endswith("_url") for each in described if isinstance(each, dict) for key in each)


def are_listed_here(run: RunDescription) -> bool:
    """Whether a list on this machine says what data a run reads, and it is not tokenized already."""
    tokenized = run.tokenized_path is not None and os.path.isdir(run.tokenized_path)
    return not tokenized and not _are_listed_remotely(run)


def _are_listed_remotely(run: RunDescription) -> bool:
    return run.dataset_dir == "ONLINE" or run.dataset_dir.startswith("REMOTE:")
