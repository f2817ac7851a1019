"""What a tokenized dataset depends on besides its data and its arguments: the code that makes it.

`datasets` keeps what was tokenized under a hash of the objects that did it, in which the code of imported modules does
not show. So the code's own hash is a field of those objects: no version of the plugin or of LLaMA-Factory ever reads
what another one has written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from llamafactory_preflight.software import Software


PACKAGES = ("llamafactory_preflight.fixer", "llamafactory_preflight.templates", "llamafactory.data")
VERSIONS = ("llamafactory_preflight", "llamafactory", "transformers")


@cache
def rules() -> str:
    """Hash of the code of `PACKAGES` and of `VERSIONS`, the same in every process of one installation."""
    software = Software.installed().as_dict()
    return digest(
        [folder for package in PACKAGES for folder in _folders(package)], [software[name] for name in VERSIONS]
    )


def digest(folders: Sequence[Path], versions: Sequence[str | None]) -> str:
    """Hash of all Python files below the folders, by their place and content, and of the versions."""
    found = hashlib.sha256(repr(list(versions)).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{folder.name}/{file.relative_to(folder).as_posix()}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
