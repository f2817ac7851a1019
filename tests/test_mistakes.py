"""A user's mistake ends `llamafactory-cli train` with one message; what LLaMA-Factory accepts is never refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml


ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "presets/cpu_smoke.yaml"
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
LINE = re.compile(r"^llamafactory-preflight: .*", re.MULTILINE)

# Calls the console script's function once for each command line; anything that it lets pass would start two ranks.
CALLS = """
import contextlib, io, json, os, sys
from llamafactory.cli import main
outcomes = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["llamafactory-cli", "train", *command]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main()
        end = None
    except SystemExit as exit:
        end = exit.code
    except BaseException as error:
        end = {"raised": repr(error)}
    outcomes.append([end, errors.getvalue()])
print(json.dumps(outcomes))
"""
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no file": (["missing.yaml"], "missing.yaml does not exist. Check the path"),
    "no YAML": (["not.yaml"], "not.yaml is not YAML: mapping values are not allowed"),
    "a list": (["list.yaml"], "list.yaml holds a list"),
    "an unknown key": (["typo.yaml"], "`cutof_len` is not an argument of LLaMA-Factory (typo.yaml). Write `cutoff"),
    "an unknown override": (["good.yaml", "cutof_len=6"], "(the command line). Write `cutoff_len`"),
    "a flag": (["good.yaml", "--cutoff_len", "5"], "'--cutoff_len' is not an override. Write it as key=value"),
    "no number": (["good.yaml", "cutoff_len=abc"], "`cutoff_len` is 'abc', not a whole number (the command line)"),
    "two of them": (["good.yaml", "cutof_len=5", "max_steps=few"], "2 arguments in the command line need attention"),
    "LoRA and BAdam": (["good.yaml", "use_badam=true"], "refuses `use_badam` with `finetuning_type: lora`"),
    "no model": (["good.yaml", "model_name_or_path=/no/such"], "The model folder /no/such does not exist"),
    "no tiny model": ([str(PRESET)], "python scripts/build_tiny_model.py --link saves/tiny-qwen3"),
}  # fmt: skip
if version("llamafactory") >= "0.9.5":  # 0.9.4 reads it
    MISTAKES["JSON"] = (["good.json"], "cannot read .json files (good.json). Rename it to .yaml, as JSON is YAML too")
STOPPED: dict[str, tuple[list[str], str]] = {
    "a template": (["good.yaml", "template=qwen33"], "LLaMA-Factory has no `template: qwen33`. The nearest are qwen3"),
    "a data set": (["good.yaml", "dataset=rowz", "dataset_dir=mine"], "dataset_info.json has no `rowz`, which"),
    "a list of data": (["good.yaml", "dataset=rowz", "dataset_dir=none"], "none/dataset_info.json does not exist"),
    "a data file": (["good.yaml", "dataset=rows", "dataset_dir=mine"], "mine/rows.json does not exist, where mine"),
    "an empty data file": (["good.yaml", "dataset=none", "dataset_dir=mine"], "mine/none.json, which `none` names"),
    "an adapter": (["good.yaml", "adapter_name_or_path=saves/a/lora"], "saves/a/lora/adapter_config.json does not"),
    "a checkpoint": (["good.yaml", "resume_from_checkpoint=gone"], "`resume_from_checkpoint: gone` is no checkpoint"),
    "no checkpoint": (["good.yaml", "resume_from_checkpoint=true", "output_dir=new"], "and new has none."),
    "an output folder": (["good.yaml", "output_dir=not.yaml/o"], "`output_dir: not.yaml/o` cannot be made"),
    "no samples": (["good.yaml", "max_samples=0"], "`max_samples: 0` leaves no data. Leave it out to take all of it."),
    "a dropout": (["good.yaml", "lora_dropout=7"], "`lora_dropout: 7.0` is a share, from 0 to 1."),
    "a target": (["good.yaml", "lora_target=nope"], "It has down_proj, gate_proj,"),
    "a logger": (["good.yaml", "report_to=zzz"], "`report_to: zzz` is no logger that transformers knows."),
    "bits": (["good.yaml", "quantization_bit=5"], "is none that `quantization_method: bnb` knows. It knows 4, 8."),
    "GaLore": (["good.yaml", "finetuning_type=full", "use_galore=true"], "set optim=adamw_torch."),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    good = PRESET.read_text().replace("saves/tiny-qwen3", str(tiny_model))
    (folder / "good.yaml").write_text(good)
    (folder / "good.json").write_text(json.dumps(yaml.safe_load(good)))
    (folder / "typo.yaml").write_text(good + "cutof_len: 5\n")
    (folder / "not.yaml").write_text("a: b: c")
    (folder / "list.yaml").write_text("- a\n- b\n")
    (folder / "mine").mkdir()
    listed = {name: {"file_name": f"{name}.json"} for name in ("rows", "none")}
    (folder / "mine/dataset_info.json").write_text(json.dumps(listed))
    (folder / "mine/none.json").write_text("[]")
    return folder


@pytest.fixture(scope="module")
def outcomes(module_run: Callable[..., Any], folder: Path) -> dict[str, tuple[Any, str]]:
    """How every command line ended, and what it said: one process of the real `llamafactory-cli`."""
    cases = MISTAKES | STOPPED
    env = ON_CPU | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    commands = json.dumps([command for command, _ in cases.values()])
    done = module_run(["python", "-c", CALLS, commands], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (end, " ".join(said.split())) for name, (end, said) in zip(cases, found, strict=True)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_certain_mistake_ends_the_parent_of_the_ranks_with_one_message(
    outcomes: dict[str, tuple[Any, str]], name: str
) -> None:
    end, said = outcomes[name]
    assert isinstance(end, str) and end.startswith("llamafactory-preflight: "), (end, said)  # Python prints it: code 1
    assert MISTAKES[name][1] in end
    assert said == ""


@pytest.mark.parametrize("name", STOPPED)
def test_a_name_that_stands_for_nothing_stops_a_run_below_its_report(
    outcomes: dict[str, tuple[Any, str]], name: str
) -> None:
    end, said = outcomes[name]
    assert end == 1
    assert STOPPED[name][1] in said and "error: " in said and "Stopped before loading anything" in said


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_llamafactory_itself_refuses_is_its_sentence_without_a_traceback(
    run: Callable[..., Any], folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    command = ["llamafactory-cli", "train", "good.yaml", "finetuning_type=full", "quantization_bit=4", "output_dir=o1"]
    env = ON_CPU | {"TMPDIR": str(tmp_path)}
    if num_ranks > 1:
        env |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(num_ranks)}
    done = run(command, cwd=folder, env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "llamafactory-preflight: LLaMA-Factory refuses these arguments: Quantization is only compatible with the LoRA "
        "or OFT method."
    )
    assert list(tmp_path.glob("llamafactory-preflight-*")) == []
    tracebacks = re.findall(r"^(.*)Traceback .*\n +File \"(.*?)\"", done.stderr, re.MULTILINE)
    assert [Path(file).name for _, file in tracebacks] == ([] if num_ranks == 1 else ["torchrun"]), tracebacks


def test_a_doubtful_value_goes_on_and_is_named_again_where_llamafactory_fails(
    run: Callable[..., Any], folder: Path
) -> None:
    done = run(["llamafactory-cli", "train", "good.yaml", "lora_rank=abc", "output_dir=o2"], cwd=folder, env=ON_CPU)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    first, *_, last = LINE.findall(done.stderr)
    assert first == "llamafactory-preflight: `lora_rank` is 'abc', not a whole number (the command line)."
    assert last.startswith("llamafactory-preflight: LLaMA-Factory has failed (TypeError: ")
    assert last.endswith(f"most likely for this: {first.partition(': ')[2]}")


def test_what_llamafactory_accepts_trains(run: Callable[..., Any], folder: Path) -> None:
    env = ON_CPU | {"ALLOW_EXTRA_ARGS": "1"}
    doubtful = ["badam_switch_interval=often", "mine_alone=5", "max_steps=1", "save_strategy=epoch", "output_dir=o3"]
    done = run(["llamafactory-cli", "train", "good.yaml", *doubtful], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "o3/adapter_model.safetensors").is_file()
    assert "`badam_switch_interval` is 'often'" in LINE.findall(done.stderr)[0]

    again = ["resume_from_checkpoint=true", "max_steps=2", "output_dir=o3"]
    done = run(["llamafactory-cli", "train", "good.yaml", *again], cwd=folder, env=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resume_from_checkpoint" not in "".join(LINE.findall(done.stderr))
    step, whole = json.loads((folder / "o3/trainer_state.json").read_text())["log_history"]
    assert step["step"] == whole["step"] == 2
    assert whole["train_loss"] == pytest.approx(step["loss"] / 2)  # of two steps it has run one
