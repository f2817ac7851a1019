"""Names of chat templates, read from the source of the installed LLaMA-Factory: importing it would import torch."""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path

from llamafactory_preflight.arguments import schema


def known() -> frozenset[str]:
    """Names of the installed LLaMA-Factory's chat templates, with those that this process has registered itself.

    None where they cannot all be read.
    """
    package = schema.package_folder("llamafactory")
    if package is None:
        return frozenset()
    file = package / "data" / "template.py"
    written = _written(file)
    loaded = next((m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == str(file)), None)
    return written | frozenset(getattr(loaded, "TEMPLATES", ())) if written else written


@lru_cache(maxsize=1)
def _written(file: Path) -> frozenset[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "register_template"]
    given = [next((k.value for k in call.keywords if k.arg == "name"), None) for call in calls]
    names = {node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(names) if len(names) == len(calls) else frozenset()


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""
