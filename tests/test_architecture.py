"""Who may import what, and other rules about the source that no other test would notice."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[1] / "plugin" / "llamafactory_preflight"
SIMULATION = PACKAGE / "simulate"  # runs the real step, so it needs the real packages
FIXER = PACKAGE / "fixer"  # runs inside LLaMA-Factory
BOARD = PACKAGE / "board"  # runs inside LLaMA-Board
WATCH = {PACKAGE / "watch" / f"{part}.py" for part in ("callback", "counters", "snapshot", "training")}  # in a run
FILES = sorted(PACKAGE.rglob("*.py"))
CORE = [file for file in FILES if file not in WATCH and not {SIMULATION, FIXER, BOARD} & set(file.parents)]
HEAVY = {"torch", "transformers", "llamafactory", "peft", "accelerate", "datasets", "numpy", "deepspeed", "rich"}
# Modules and folders in the order in which data flows: each may import only from those that stand before it.
ORDERS = {
    "": (
        *("__init__", "handoff", "phrases", "errors", "units", "settings", "failing", "software", "whole_file"),
        *("arguments", "parallel", "model", "run", "data", "memory", "simulate"),
        *("templates", "fixer", "presets"),
        *("device", "advice", "machine", "verdict", "result", "findings", "fitting", "preflight", "report"),
        *("board", "commands", "cli", "__main__", "guard", "watch", "hooks", "_startup"),
    ),
    "memory": (
        *("paper", "card", "parameters", "precision", "quantization", "sharding", "badam", "batch", "statics"),
        *("layers", "optimizers", "preference", "fsdp", "zero", "host", "fsdp_refusals", "refusals"),
        *("result", "remarks", "estimators", "estimate", "__init__"),
    ),
}
MAX_LINES = 300


def name(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def imports(file: Path) -> Iterator[str]:
    """Full names of everything that a file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(file: Path, folder: str) -> str:
    """The module or folder directly in a folder of the package that a file is or lies in."""
    return file.relative_to(PACKAGE / folder).with_suffix("").parts[0]


def parts_imported(file: Path, folder: str) -> set[str]:
    """The modules and folders directly in a folder of the package from which a file imports."""
    prefix = ".".join([PACKAGE.name, *filter(None, [folder])]) + "."
    return {item.removeprefix(prefix).split(".")[0] for item in imports(file) if item.startswith(prefix)}


def test_the_rules_have_something_to_rule() -> None:
    assert len(CORE) > 20
    for folder, order in ORDERS.items():
        inside = {part(file, folder) for file in FILES if file.is_relative_to(PACKAGE / folder)}
        assert set(order) == inside and len(order) == len(inside)


@pytest.mark.parametrize("file", CORE, ids=name)
def test_the_core_imports_nothing_heavy(file: Path) -> None:
    assert {item.partition(".")[0] for item in imports(file)} & HEAVY == set()


def test_the_core_loads_nothing_heavy() -> None:
    modules = [
        ".".join([PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for file in CORE
        if file.name != "__main__.py"
    ]
    code = f"import sys, {', '.join(modules)}\nprint(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("folder", ORDERS)
@pytest.mark.parametrize("file", FILES, ids=name)
def test_data_flows_one_way(folder: str, file: Path) -> None:
    if not file.is_relative_to(PACKAGE / folder):
        return
    order = ORDERS[folder]
    later = set(order[order.index(part(file, folder)) + 1 :])
    assert parts_imported(file, folder) & later == set()


@pytest.mark.parametrize("file", [file for file in CORE if file.name != "units.py"], ids=name)
def test_only_the_report_puts_bytes_into_words(file: Path) -> None:
    if file.name != "report.py":
        assert "llamafactory_preflight.units.gib" not in set(imports(file))


@pytest.mark.parametrize("file", CORE, ids=name)
def test_only_hooks_names_functions_to_patch(file: Path) -> None:
    if file.name in {"hooks.py", "_startup.py"}:
        return
    texts = [
        node.value
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if text.startswith("llamafactory.") and " " not in text] == []


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_module_is_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", CORE, ids=name)
def test_nothing_executes_text(file: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"exec", "eval", "compile", "__import__"} == set()
