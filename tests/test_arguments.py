from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import arguments
from llamafactory_preflight.arguments import schema
from llamafactory_preflight.errors import Refused, UserError
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


FILES = {
    "plain": ("model_name_or_path: a/b\nlearning_rate: 1e-4\ncutoff_len: 4096\nbf16: true\n", []),
    "overrides": ("model_name_or_path: a/b\nlora_rank: 8\n", ["lora_rank=64", "learning_rate=2e-5", "bf16=true"]),
    "traps": ("a: no\nb: 'no'\nc: 1_000\nd: .5\ne: 2024-01-01\nf:\ng: 0x10\nh: [x, y]\ni: {j: 1}\n", []),
    "nested override": ("i: {j: 1, k: 2}\n", ["i.j=3", "l=[1,2]", "m=null", "n="]),
    "interpolation stays text": ("a: 1\nb: ${a}\n", []),
    "empty": ("", ["a=1"]),
    "comments": ("# none\nlora_target: all  # every linear layer\n", []),
    "json is yaml": ('{"a": 1e-4, "b": [true, null]}', ["b=2"]),
}
FLAGS = {
    "kinds": "--lora_rank 4 --learning_rate 1e-4 --bf16 --stage sft --output_dir out --save_steps 0.5".split(),
    "truth values": "--bf16 false --double_quantization True --use_v1_kernels yes --packing no".split(),
    "hyphens and equals": "--lora-rank=4 --per-device-train-batch-size 2".split(),
    "no_ complement": ["--no_double_quantization"],
    "abbreviation": "--per_device_train_b 3".split(),
    "text that looks like a number": "--deepspeed 3 --model_name_or_path 7".split(),
    "enumerations": "--flash_attn fa2 --optim adamw_8bit --eval_strategy no --lr_scheduler_type cosine".split(),
    "lists": "--label_names a b --report_to none".split(),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("yaml")
    argvs = []
    for name, (text, overrides) in FILES.items():
        file = folder / f"{name}.yaml"
        file.write_text(text)
        argvs.append([str(file), *overrides])
    question = {"files": argvs, "flags": [*FLAGS.values(), []]}
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_parser.py"))],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])  # LLaMA-Factory may log before it
    return answer | {"argvs": argvs}


@pytest.mark.parametrize("position", range(len(FILES)), ids=list(FILES))
def test_files_are_read_as_llamafactory_reads_them(real: dict[str, Any], position: int) -> None:
    argv = real["argvs"][position]
    assert arguments.read(argv) == real["files"][position]
    assert arguments.read(Path(argv[0]), argv[1:]) == real["files"][position]


@pytest.mark.parametrize("position", range(len(FLAGS)), ids=list(FLAGS))
def test_flags_are_read_as_llamafactory_reads_them(real: dict[str, Any], position: int) -> None:
    theirs, unknown = real["flags"][position]
    ours = arguments.read(list(FLAGS.values())[position])
    assert unknown == []
    assert ours  # every case gives something
    assert ours == {key: theirs[key] for key in ours}
    nothing_given, _ = real["flags"][-1]
    left_out = theirs.keys() - ours.keys()
    assert {key: theirs[key] for key in left_out} == {key: nothing_given[key] for key in left_out}


def test_the_schema_has_exactly_the_real_arguments_and_their_literal_defaults(real: dict[str, Any]) -> None:
    known = schema.load()
    assert known is not None
    assert known.arguments.keys() == real["defaults"].keys()
    literal = {name: a.defaults[0] for name, a in known.arguments.items() if len(a.defaults) == 1}
    assert len(literal) > 250
    assert literal == {name: real["defaults"][name] for name in literal}


def test_every_real_default_passes_the_schema(real: dict[str, Any]) -> None:
    known = schema.load()
    assert known is not None
    given = {key: value for key, value in real["defaults"].items() if value != "<required>"}
    assert [str(problem) for _, problem in known.problems(given, allow_extra=False)] == []


def test_the_defaults_of_a_run_are_the_real_ones(real: dict[str, Any]) -> None:
    ours = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(RunDescription)
    }
    resolved = from_arguments({"model_name_or_path": "a/b"}, software=Software.installed(), origin="a.yaml")
    assert resolved.optim == real["defaults"]["optim"]
    differing = {}
    for name, value in ours.items():
        if name in ("optim", "unmodelled", "accelerate"):
            continue
        theirs = real["defaults"].get(name, "<no such argument>")
        if isinstance(value, tuple):
            theirs = tuple(theirs.split(",")) if theirs else ()
        # An empty list and false are how transformers says `none` for FSDP in some versions.
        if theirs != value and not (name == "fsdp" and not theirs):
            differing[name] = (value, theirs)
    newer = {"fp8", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_v1_kernels", "use_hyper_parallel", "use_kt"}
    differing = {
        name: pair for name, pair in differing.items() if pair[1] != "<no such argument>" or name not in newer
    }
    assert differing == {}


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("lora_rank: 4\n"))
    assert arguments.read("-", ["lora_alpha=8"]) == {"lora_rank": 4, "lora_alpha": 8}


def test_unknown_flags_are_kept_for_the_schema_to_judge() -> None:
    assert arguments.read(["--lora_rnk", "4", "--bf16"]) == {"lora_rnk": "4", "bf16": True}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- a\n- b\n", "holds a list"),
        ("a.yaml", "3", "holds no mapping"),
        ("a.yaml", "{a", "is not YAML"),
        ("a.yaml", "a: b: c", "is not YAML"),
        ("a.yaml", "a: 1\na: 2", "duplicate key a, line 2, column 1"),
        ("a.yaml", "a:\n\tb: 1", "is not YAML.*line 2, column 1"),
        ("a.yaml", "a: &a [*a]", "is not YAML"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "a single document in the stream but found another document, line 2"),
        ("a.yaml", "", "holds no arguments"),
        ("a.yaml", "hello", "holds no arguments"),
        ("a.yaml", "!!python/object/apply:os.system ['exit']", "is not YAML"),
        ("a.json", "null", "holds no arguments"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", "{a", "is not JSON"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", "3", "holds no mapping"),
        ("a.toml", "a = 1", r"is not a \.yaml, \.yml or \.json file"),
    ],
)
def test_faulty_files(written: Callable[[str, str], Path], name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments.read(written(name, text))


@pytest.mark.parametrize("content", [bytes(range(256)), "a: 1".encode("utf-16")])
def test_what_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.yaml is not UTF-8 text"):
        arguments.read(file)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8", errors="surrogateescape"))
    with pytest.raises(UserError, match="standard input is not UTF-8 text"):
        arguments.read("-")


@pytest.mark.parametrize("marks", ["\ufeffa: 1\nb: 2\n", "a: 1\r\nb: 2\r\n"], ids=["byte order mark", "crlf"])
def test_what_editors_add_is_no_fault(tmp_path: Path, marks: str) -> None:
    file = tmp_path / "参数 1.yaml"
    file.write_bytes(marks.encode())
    assert arguments.read(file) == {"a": 1, "b": 2}


def test_what_cannot_be_read_is_told_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(UserError, match=r"loop\.yaml cannot be read: Too many levels of symbolic links\.$"):
        arguments.read(tmp_path / "loop.yaml")
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(UserError, match=r"a\.yaml cannot be read: Is a directory\.$"):
        arguments.read(tmp_path / "a.yaml")


def test_a_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input holds no arguments"):
        arguments.read("-")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope\.yaml does not exist"):
        arguments.read(tmp_path / "nope.yaml")


@pytest.mark.parametrize("override", ["--lora_rank", "lora_rank", "--lora_rank=4", "=4"])
def test_a_faulty_override(written: Callable[[str, str], Path], override: str) -> None:
    with pytest.raises(UserError, match="is not an override"):
        arguments.read(written("a.yaml", "a: 1"), [override])


@pytest.mark.parametrize("override", ["deepspeed={stage: 2", "dataset=[identity", "lora_rank=a: b: c"])
def test_an_override_that_is_not_yaml_is_named_itself(written: Callable[[str, str], Path], override: str) -> None:
    with pytest.raises(Refused, match=rf"The value in '{re.escape(override)}' is not YAML") as raised:
        arguments.read(written("a.yaml", "a: 1"), ["lora_rank=4", override])
    assert "a.yaml" not in str(raised.value)


@pytest.mark.parametrize("argv", [["--lora_rank", "four"], ["--bf16", "maybe"], ["--stage", "foo"], ["word"]])
def test_faulty_flags(argv: list[str]) -> None:
    with pytest.raises(UserError, match="command line"):
        arguments.read(argv)
