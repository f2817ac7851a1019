"""Every argument that the installed LLaMA-Factory accepts, read from its source: importing it would import torch.

The dataclasses of `llamafactory/hparams` and of transformers' training arguments are parsed with `ast`; nothing of
them is executed. Where they cannot be read, `load` returns None and no key is called unknown.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llamafactory_preflight.errors import Refused, UserError
from llamafactory_preflight.phrases import joined, phrase


ROOT_CLASSES = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments")
PLAIN_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict}
KIND_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list",
              "dict": "a mapping"}  # fmt: skip

TRUTH_TOO = frozenset({"resume_from_checkpoint"})
"""Declared as text, and taken as a truth value by what reads them: `Trainer.train` looks for the last checkpoint."""

COMPUTED_WITH = frozenset(
    {"cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "max_steps"}
)
"""Numbers that no training gets past without computing with them; LLaMA-Factory's parser takes any text for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One field of LLaMA-Factory's argument dataclasses.

    Attributes:
        name: The key in a YAML file.
        kinds: Accepted kinds: names of `PLAIN_KINDS`, `None`, `enum` for one of `choices` alone, and `other` for types
            that cannot be judged from here.
        choices: The values of a `Literal` or of one of LLaMA-Factory's enumerations, or an empty tuple.
        defaults: The literal default; several where it depends on a version, none where it is not a literal.
        aliases: Further spellings on the command line.
    """

    name: str
    kinds: frozenset[str]
    choices: tuple[Any, ...] = ()
    defaults: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()

    def fault(self, value: object) -> str | None:
        """Why `value` is not acceptable, or None."""
        if value is None:
            return None if self.kinds & {"None", "other"} else "is empty"
        if self.choices and not isinstance(value, (list, dict)):
            if value in self.choices or self.kinds & {"other", "str"}:
                return None
            choices = ", ".join(map(str, self.choices))
            return phrase("is {value}, which is none of {choices}", value=repr(value), choices=choices)
        if isinstance(value, bool) and self.name in TRUTH_TOO:
            return None
        if isinstance(value, bool) and "other" in self.kinds and "bool" not in self.kinds and "str" in self.kinds:
            # YAML reads an unquoted `no` as false, which transformers' enumerations refuse.
            return phrase(
                "is {value}, not text; an unquoted yes or no is a truth value in YAML, so quote it",
                value=str(value).lower(),
            )
        if "other" in self.kinds or _fits(value, self.kinds):
            return None
        wanted = joined(" or ", (words for kind, words in KIND_WORDS.items() if kind in self.kinds))
        return phrase("is {value}, not {wanted}", value=repr(value), wanted=wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """All arguments by name."""

    arguments: Mapping[str, Argument]

    def problems(self, given: Mapping[str, Any], *, allow_extra: bool) -> Iterator[tuple[str, UserError]]:
        """Yields the key and the fault of every argument that LLaMA-Factory would refuse or choke on."""
        for key, value in given.items():
            argument = self.arguments.get(key)
            if argument is None:
                if not allow_extra:
                    yield (
                        key,
                        UserError(
                            phrase("`{key}` is not an argument of LLaMA-Factory", key=key), next_step=self.suggest(key)
                        ),
                    )
            elif fault := argument.fault(value):
                text = phrase("`{name}` {fault}", name=key, fault=fault)
                yield key, Refused(text) if _is_computed_with(key, value, given) else UserError(text)

    def suggest(self, key: str) -> str:
        """A next step for an unknown key: the nearest known ones, or how to pass it anyway."""
        near = difflib.get_close_matches(key, self.arguments, n=1, cutoff=0.75)
        return (
            phrase("Write `{name}` if you meant that", name=near[0])
            if near
            else "Remove it, or set ALLOW_EXTRA_ARGS=1"
        )


@lru_cache(maxsize=1)
def load() -> Schema | None:
    """Reads the installed versions; takes some tens of milliseconds."""
    llamafactory, transformers = package_folder("llamafactory"), package_folder("transformers")
    if llamafactory is None or transformers is None:
        return None
    return parse(llamafactory, transformers)


def parse(llamafactory: Path, transformers: Path) -> Schema | None:
    """Reads the argument classes below two package folders; None where they do not look as expected."""
    files = [*sorted((llamafactory / "hparams").glob("*_args.py"))]
    # transformers has a TrainingArguments too, so its classes carry a prefix.
    classes: dict[str, ast.ClassDef] = {}
    try:
        for file in files:
            classes |= _classes(file)
        enums = _enums(llamafactory / "extras" / "constants.py")
        for file in (transformers / "training_args.py", transformers / "training_args_seq2seq.py"):
            classes |= {f"transformers.{name}": node for name, node in _classes(file).items()}
    except (OSError, SyntaxError):
        return None
    arguments: dict[str, Argument] = {}
    for root in ROOT_CLASSES:
        if root not in classes:
            return None
        arguments |= {argument.name: argument for argument in _fields(root, classes, enums)}
    return Schema(arguments=arguments)


def package_folder(name: str) -> Path | None:
    """Folder of an installed top-level package, nothing of which is run; None where there is none."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _enums(file: Path) -> dict[str, tuple[Any, ...]]:
    """The values of every enumeration in a file: dataclasses take any text for them, and the model refuses it late."""
    return {
        name: tuple(
            statement.value.value
            for statement in node.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        )
        for name, node in _classes(file).items()
        if any("Enum" in ast.unparse(base) for base in node.bases)
    }


def _fields(
    name: str, classes: Mapping[str, ast.ClassDef], enums: Mapping[str, tuple[Any, ...]]
) -> Iterator[Argument]:
    node = classes[name]
    prefix = "transformers." if name.startswith("transformers.") else ""
    for base in node.bases:
        text = ast.unparse(base)
        if text in {"BaseTrainingArguments", "Seq2SeqTrainingArguments"}:
            yield from _fields("transformers.Seq2SeqTrainingArguments", classes, enums)
        elif prefix + text in classes:
            yield from _fields(prefix + text, classes, enums)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            argument = _argument(statement.target.id, statement.annotation, statement.value, node, enums)
            if argument is not None:
                yield argument


def _argument(
    name: str,
    annotation: ast.expr,
    value: ast.expr | None,
    owner: ast.ClassDef,
    enums: Mapping[str, tuple[Any, ...]],
) -> Argument | None:
    keywords = {k.arg: k.value for k in value.keywords} if isinstance(value, ast.Call) else {"default": value}
    if "ClassVar" in ast.unparse(annotation) or _literals(keywords.get("init"), owner) == (False,):
        return None
    metadata = keywords.get("metadata")
    aliases: tuple[str, ...] = ()
    if isinstance(metadata, ast.Dict):
        for key, item in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "aliases":
                found = ast.literal_eval(item)
                aliases = (found,) if isinstance(found, str) else tuple(found)
    choices: list[Any] = []
    kinds = frozenset(_kinds(annotation, choices, enums))
    return Argument(
        name=name,
        kinds=kinds,
        choices=tuple(choices),
        defaults=_literals(keywords.get("default"), owner),
        aliases=aliases,
    )


def _literals(node: ast.expr | None, owner: ast.ClassDef) -> tuple[Any, ...]:
    """The values an expression may have: itself, or what the class body assigns to that name under its conditions."""
    if isinstance(node, ast.Name):
        assigned = [
            statement.value
            for statement in ast.walk(owner)
            if isinstance(statement, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == node.id for t in statement.targets)
        ]
        return tuple(value for item in assigned for value in _literals(item, owner))
    try:
        return () if node is None else (ast.literal_eval(node),)
    except ValueError:
        pass
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _literals(node.left, owner), _literals(node.right, owner)
        return (left[0] * right[0],) if left and right else ()
    return ()


def _kinds(node: ast.expr, choices: list[Any], enums: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _kinds(node.left, choices, enums)
        yield from _kinds(node.right, choices, enums)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _kinds(ast.parse(node.value, mode="eval").body, choices, enums)
    elif isinstance(node, ast.Constant):
        yield "None"
    elif isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2].lower()
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "literal":
            choices.extend(ast.literal_eval(item) for item in items)
        elif name in {"optional", "union"}:
            for item in items:
                yield from _kinds(item, choices, enums)
            if name == "optional":
                yield "None"
        else:
            yield name if name in PLAIN_KINDS else "other"
    else:
        name = ast.unparse(node)
        choices.extend(enums.get(name, ()))
        yield "enum" if name in enums else name if name in PLAIN_KINDS else "other"


def _is_computed_with(key: str, value: object, given: Mapping[str, Any]) -> bool:
    """Whether every such run computes with the argument, and text that is no number would end it."""
    if not isinstance(value, str) or key not in COMPUTED_WITH or not (key == "cutoff_len" or given.get("do_train")):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def _fits(value: object, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, float) and value.is_integer() and "int" in kinds:
        return True
    if isinstance(value, int) and "float" in kinds:
        return True
    if "str" in kinds and not isinstance(value, dict):
        return True  # Numbers work as names, and comma-separated text may be given as a list.
    return any(isinstance(value, kind) for name, kind in PLAIN_KINDS.items() if name in kinds)
