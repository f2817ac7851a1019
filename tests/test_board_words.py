"""Whatever the preflight may say in LLaMA-Board can be said in each of the board's languages."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamafactory_preflight import report
from llamafactory_preflight.board import panel, words
from llamafactory_preflight.device import Device, Process
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.findings import hardware
from llamafactory_preflight.phrases import joined, phrase
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB


PACKAGE = Path(words.__file__).parents[1]
AFTER_ENGLISH = json.loads(Path(words.__file__).with_name("phrases.json").read_text(encoding="utf-8"))
# What the board never calls: commands of a terminal, the simulation, what runs in the training's process; and what the
# template fixer says, which the board shows as `llamafactory-cli template` printed it.
ELSEWHERE = {"cli.py", "commands", "presets.py", "arguments/reading.py", "arguments/refusal.py", "simulate",
             "templates", "fixer", "watch"}  # fmt: skip
ELSEWHERE_FUNCTIONS = {"taking_part", "allowed"}  # options of the command line
SAYS = {"UserError", "Refused", "Unmodelled", "DriverError", "Finding", "Change", "Verdict", "unknown", "phrase"}
KEYWORDS = {"message", "costs", "next_step", "reasons"}
NAMED = {"findings", "device", "run.py", "schema.py", "images.py"}  # sentences stand at the top of these modules
YIELDS = {"refusals.py", "model_config.py"}


def texts(node: ast.AST) -> Iterator[ast.expr]:
    """The literal sentences that an expression may come to."""
    if isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, (ast.BoolOp, ast.Dict)):
        yield from (text for value in node.values for text in texts(value))
    elif isinstance(node, ast.Tuple):
        yield from (text for value in node.elts for text in texts(value))
    elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node


def sentences(file: Path) -> Iterator[ast.expr]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and set(file.relative_to(PACKAGE).parts) & NAMED:
            yield from (text for text in texts(node.value) if " " in str(getattr(text, "value", "")))
    skipped = [node for node in ast.walk(tree) if getattr(node, "name", "") in ELSEWHERE_FUNCTIONS]
    outside = {id(inner) for node in skipped for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in outside:
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg in KEYWORDS)]
            if called in SAYS:
                yield from (text for value in given for text in texts(value))
        elif isinstance(node, ast.Yield) and node.value is not None and file.name in YIELDS:
            yield from texts(node.value)


def board_files() -> list[Path]:
    skipped = [PACKAGE / place for place in ELSEWHERE]
    return [file for file in sorted(PACKAGE.rglob("*.py")) if not any(map(file.is_relative_to, skipped))]


def has_words(pattern: str) -> bool:
    return bool(re.search("[A-Za-z]", re.sub(r"\{\w+\}", "", pattern)))


def test_every_sentence_can_be_said_in_every_language() -> None:
    found = [(file, text) for file in board_files() for text in sentences(file)]
    assert len(found) > 180
    missing = []
    for file, text in found:
        known = isinstance(text, ast.Constant) and (text.value in AFTER_ENGLISH or not has_words(str(text.value)))
        if not known:
            missing.append(f"{file.relative_to(PACKAGE)}:{text.lineno} {ast.unparse(text)}")
    assert missing == []


def test_the_table_has_every_language_and_the_same_places_to_fill() -> None:
    for english, others in AFTER_ENGLISH.items():
        names = [{name for _, name, _, _ in string.Formatter().parse(text) if name} for text in (english, *others)]
        assert len(others) == len(words.LANGUAGES) - 1 and all(others), english
        assert all(name == names[0] for name in names), english


def test_the_table_says_nothing_that_nobody_says() -> None:
    said = {
        node.value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
    }
    separators = {re.sub(r"\{part\d\}", "", text) for text in AFTER_ENGLISH if text.startswith("{part0}")}
    assert [text for text in AFTER_ENGLISH if text not in said and not text.startswith("{part0}")] == []
    assert separators <= {" ", ", ", " and ", " and  and ", " or ", " or  or "}


def test_a_mistake_is_told_with_its_place_and_the_next_step() -> None:
    error = UserError(phrase("{name} is a file", name="a/b"), where="the fields", next_step="Check the path")
    assert str(error) == "a/b is a file (the fields). Check the path."
    assert words.said(error.text, "zh") == "a/b 是一个文件（各项设置）。请检查路径。"
    assert words.said(error.text, "ru") == "a/b — это файл (поля). Проверьте путь."
    assert words.said(error.text, "en") == words.said(error.text, None) == str(error)


def test_several_mistakes_are_told_one_a_line() -> None:
    with pytest.raises(UserError) as caught:
        from_arguments({"model_name_or_path": "a", "learning_rate": "fast", "no_such": 1}, software=Software(),
                       origin="the fields")  # fmt: skip
    english, korean = (words.said(caught.value.text, lang).splitlines() for lang in ("en", "ko"))
    assert english[0] == "2 arguments in the fields need attention:"
    assert korean[0] == "입력 항목의 인수 2개를 확인해야 합니다:"
    assert any("`no_such`은(는) LLaMA-Factory의 인수가 아닙니다" in line for line in korean)
    assert any("`learning_rate` 값이 'fast'입니다. 필요한 것: 숫자" in line for line in korean)


def test_a_finding_keeps_its_amounts_in_every_language() -> None:
    process = Process(pid=7, name="{held0}", used_bytes=3 * GIB)
    card = Device(name="x", total_bytes=8 * GIB, free_bytes=4 * GIB, processes=(process,), index=0)
    (finding,) = hardware.card(RunDescription(), card, Software(), fits=False)
    assert report.message(finding) == (
        "4.00 GiB of GPU 0 are in use by something else: (held0) (PID 7) with 3.00 GiB; 1.00 GiB of processes that "
        "cannot be seen from here (another container or user). End it, or choose another card with "
        "CUDA_VISIBLE_DEVICES."
    )
    assert panel.told(finding, "ja") == (
        "警告: GPU 0 の 4.00 GiB がほかで使われています: (held0)（PID 7） が 3.00 GiB; ここから見えないプロセス"
        "（別のコンテナやユーザー）が 1.00 GiB。終了するか、CUDA_VISIBLE_DEVICES で別のカードを選んでください。"
    )


def test_a_phrase_is_a_string_that_survives_copies_and_processes() -> None:
    made = joined(" and ", (phrase("{name} is a file", name="x"), "Check the path"))
    assert made == "x is a file and Check the path" and json.dumps(made) == f'"{made}"'
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert words.said(other, "zh") == words.said(made, "zh") == "x 是一个文件和请检查路径"
