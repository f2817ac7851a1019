"""Asks the installed LLaMA-Factory, in a process of its own, how it reads arguments. Prints JSON on the last line."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from typing import Any


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else f"<{type(value).__name__}>"


def default(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, as it stands before `__post_init__`."""
    if field.default is not dataclasses.MISSING:
        return plain(field.default)
    return plain(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "<required>"


def main() -> None:
    """Reads `{"files": [[argv], …], "flags": [[argv], …]}` on standard input."""
    question = json.load(sys.stdin)
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    files = []
    for argv in question["files"]:
        sys.argv = ["llamafactory-cli", *argv]
        files.append(parser.read_args())
    hf_parser = HfArgumentParser(parser._TRAIN_ARGS)
    flags = []
    for argv in question["flags"]:
        namespace, unknown = hf_parser.parse_known_args(argv)
        flags.append([{key: plain(value) for key, value in vars(namespace).items()}, unknown])
    fields = {
        field.name: default(field) for cls in parser._TRAIN_ARGS for field in dataclasses.fields(cls) if field.init
    }
    print("\n" + json.dumps({"files": files, "flags": flags, "defaults": fields}))


if __name__ == "__main__":
    main()
