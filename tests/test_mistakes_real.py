"""What counts as certain is certain: the real LLaMA-Factory ends with it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.data_loader import BatchSamplerShard
from llamafactory.data.parser import get_dataset_list
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams.finetuning_args import FinetuningArguments
from llamafactory.train import trainer_utils
from torch.utils.data import BatchSampler, SequentialSampler

from llamafactory_preflight import findings, preflight
from llamafactory_preflight.advice import contradictions
from llamafactory_preflight.arguments import schema, template_names
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.findings import arguments, names, starting, values
from llamafactory_preflight.model import known_models
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.software import Software


RUN = RunDescription(model_name_or_path="m", do_train=True, dataset=("rows",))
# Trains once for each value, in one process, without the plugin's checks.
TRAININGS = """
import json, sys
from omegaconf import OmegaConf
from llamafactory.train.tuner import run_exp
preset, changes, keys = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.argv = sys.argv[:1]
outcomes = {}
for key in ["", *keys]:
    args = OmegaConf.to_container(OmegaConf.load(preset)) | changes | ({key: "abc"} if key else {})
    try:
        run_exp(args)
        outcomes[key] = "trained"
    except Exception as error:
        outcomes[key] = type(error).__name__
print(json.dumps(outcomes))
"""


def test_no_training_gets_past_text_where_every_run_computes(
    run: Callable[..., Any], root: Path, tmp_path: Path, tiny_model: Path
) -> None:
    changes = {
        "model_name_or_path": str(tiny_model), "dataset_dir": str(root / "presets/data"), "max_samples": 8,
        "max_steps": 1, "output_dir": str(tmp_path / "out"), "plot_loss": False,
    }  # fmt: skip
    keys = sorted(schema.COMPUTED_WITH)
    command = ["python", "-c", TRAININGS, root / "presets/cpu_smoke.yaml", json.dumps(changes), json.dumps(keys)]
    done = run(command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "", "LLAMAFACTORY_PREFLIGHT": "off"})
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.pop("") == "trained"
    assert outcomes.keys() == schema.COMPUTED_WITH and set(outcomes.values()) <= {"TypeError", "ValueError"}, outcomes


# Values that LLaMA-Factory's parser takes, and whether a training gets past them.
VALUES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"max_samples": 0}, False),
    ({"max_samples": -3}, False),
    ({"quantization_bit": 5}, False),
    ({"lora_dropout": 7}, False),
    ({"lora_dropout": 1.5}, False),
    ({"lora_dropout": 1}, True),
    ({"lora_dropout": -1}, True),
    ({"lora_target": "nope"}, False),
    ({"lora_target": "q_prj,v_prj"}, False),
    ({"lora_target": "nope,q_proj"}, True),
    ({"lora_target": "lm_head"}, True),
    ({"report_to": "zzz"}, False),
    ({"report_to": ["none"]}, True),
    ({"adapter_name_or_path": "/missing"}, False),
    ({"adapter_name_or_path": "./out/a/b"}, False),
    ({"stage": "dpo"}, False),
    ({"dataset": "ranked", "dataset_dir": "{here}"}, False),
    ({"dataset": "nothing", "dataset_dir": "{here}"}, False),
    ({"dataset": "folder", "dataset_dir": "{here}"}, True),
]
EACH = """
import json, sys
from omegaconf import OmegaConf
from llamafactory.train.tuner import run_exp
given, changes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.argv = sys.argv[:1]
outcomes = []
for change in changes:
    try:
        run_exp(given | change)
        outcomes.append(True)
    except Exception as error:
        print(repr(error), file=sys.stderr)
        outcomes.append(False)
print(json.dumps(outcomes))
"""


def test_a_value_is_refused_where_no_training_gets_past_it(
    run: Callable[..., Any], root: Path, tmp_path: Path, tiny_model: Path
) -> None:
    rows = [{"instruction": "a", "input": "", "output": "b"}] * 4
    (tmp_path / "rows").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "rows/rows.json").write_text(json.dumps(rows))
    listed = {"ranked": {"file_name": "rows", "ranking": True}, "folder": {"file_name": "rows"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed | {"nothing": {"file_name": "nothing"}}))
    given = yaml.safe_load((root / "presets/cpu_smoke.yaml").read_text(encoding="utf-8")) | {
        "model_name_or_path": str(tiny_model), "dataset_dir": str(root / "presets/data"), "max_samples": 4,
        "max_steps": 1, "output_dir": str(tmp_path / "out"), "plot_loss": False, "use_cpu": True,
    }  # fmt: skip
    changes = [json.loads(json.dumps(change).replace("{here}", str(tmp_path))) for change, _ in VALUES]
    command = ["python", "-c", EACH, json.dumps(given), json.dumps(changes)]
    done = run(command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "", "LLAMAFACTORY_PREFLIGHT": "off"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [trains for _, trains in VALUES]
    for change, (_, trains) in zip(changes, VALUES, strict=True):
        result = preflight.examine(
            given | change, origin="a.yaml", beside=None, devices=(), host_budget_bytes=None, proposes=False
        )
        assert findings.stops(result.findings) is not trains, (change, result.findings)


def test_loggers_are_those_of_transformers_whether_it_is_loaded_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    written = values._written_reporters()
    assert written == tuple(integration_utils.INTEGRATION_TO_CALLBACK)
    mine = replace(RUN, report_to=("mine",))
    assert [finding.id for finding in values.reports(mine)] == ["logger-unknown"]
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mine", object)
    assert list(values.reports(mine)) == []


def test_what_other_code_loads_is_not_judged(tmp_path: Path) -> None:
    shape = ModelShape.from_config(known_models.config("Qwen/Qwen3-0.6B") or {})
    wrong = replace(RUN, lora_dropout=7, lora_target=("nope",), adapter_name_or_path=("a/b",))
    for change in ({"use_unsloth": True}, {"use_kt": True}, {}, {"finetuning_type": "full"}, {"do_train": False}):
        assert list(values.adapter(replace(wrong, **change), shape)) == []
        assert list(starting.adapters(replace(wrong, **change), trains=True)) == []
    gone = replace(RUN, adapter_name_or_path=(str(tmp_path),), adapter_folder="inner")
    assert len(list(starting.adapters(gone, trains=True))) == 1 and not list(starting.adapters(gone, trains=False))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/adapter_config.json").write_text("{}")
    assert list(starting.adapters(gone, trains=True)) == []
    quantized = replace(shape, quantization_method="gptq")
    five = replace(RUN, quantization_bit=5)
    assert list(values.quantization(five, quantized)) == list(values.quantization(five, None)) == []
    assert list(values.quantization(replace(five, quantization_method="hqq"), shape)) == []
    (tmp_path / "tokenized").mkdir()
    assert list(values.samples(replace(RUN, max_samples=0, tokenized_path=str(tmp_path / "tokenized")))) == []


def test_every_template_of_llamafactory_is_known() -> None:
    assert template_names.known() == TEMPLATES.keys()
    found = list(names.template(replace(RUN, template="qwen3_nothnk")))
    assert found[0].set == {"template": "qwen3_nothink"}
    assert list(names.template(replace(RUN, template="qwen3"))) == []
    assert list(names.template(RUN)) == []


def test_a_template_that_the_program_itself_registers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.id for found in names.template(replace(RUN, template="mine"))] == ["template-unknown"]
    monkeypatch.setitem(TEMPLATES, "mine", TEMPLATES["qwen3"])
    assert list(names.template(replace(RUN, template="mine"))) == []


@pytest.mark.parametrize("text", [None, "{}", "[]", "no JSON", '{"rows": {"file_name": "a.json"}}', '{"other": {}}'])
@pytest.mark.parametrize("name", ["rows", "rowz"])
def test_a_data_set_is_missing_where_llamafactory_finds_none(tmp_path: Path, text: str | None, name: str) -> None:
    if text is not None:
        (tmp_path / "dataset_info.json").write_text(text)
        (tmp_path / "a.json").write_text("[]")
    given = replace(RUN, dataset=(name,), dataset_dir=str(tmp_path))
    try:
        get_dataset_list([name], str(tmp_path))
        fails = False
    except ValueError:
        fails = True
    found = list(names.data_sets(given, trains=True))
    assert [finding.severity for finding in found] == (["error"] if fails else [])
    assert all(f"{tmp_path}/dataset_info.json" in finding.message for finding in found)
    assert all(f"`{name}`" in finding.message or f"dataset: {name}" in finding.message for finding in found)


@pytest.mark.parametrize("place", ["", "script_url", "cloud_file_name", "hf_hub_url"])
@pytest.mark.parametrize("rows", ["a.json", "folder", "gone.json", "gone/a.json"])
def test_a_file_of_data_is_missing_where_llamafactory_finds_none(tmp_path: Path, rows: str, place: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("a.json", "folder/b.json"):
        (tmp_path / file).write_text('[{"instruction": "a", "input": "", "output": "b"}]')
    described = {"file_name": rows} | ({place: "x/y"} if place else {})
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": described}))
    given = replace(RUN, dataset=("rows",), dataset_dir=str(tmp_path))
    found = list(names.data_sets(given, trains=True))
    (listed,) = get_dataset_list(["rows"], str(tmp_path))
    missing = listed.load_from == "file" and not (tmp_path / listed.dataset_name).exists()
    assert missing is (rows.startswith("gone") and not place)
    assert [finding.id for finding in found] == ["data-file-missing"] * missing
    assert all(f"{tmp_path}/{rows} does not exist" in finding.message for finding in found)


def test_data_that_is_elsewhere_is_not_looked_for(tmp_path: Path) -> None:
    away = replace(RUN, dataset_dir=str(tmp_path))
    assert [finding.severity for finding in names.data_sets(away, trains=False)] == ["warning"]
    for change in ({"dataset_dir": "ONLINE"}, {"dataset_dir": "REMOTE:a/b"}, {"tokenized_path": str(tmp_path)}):
        assert list(names.data_sets(replace(away, **change), trains=True)) == []


# Asks transformers' Trainer, which LLaMA-Factory's inherit from, to go on from a checkpoint, and how it ends.
RESUMES = """
import json, sys
import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging
logging.disable_progress_bar()
logging.set_verbosity_error()
class Model(torch.nn.Linear):
    def forward(self, x): return {"loss": super().forward(x).sum()}
def resume(steps, value=None):
    given = TrainingArguments(output_dir=sys.argv[1], max_steps=steps, save_steps=1, use_cpu=True, report_to="none")
    trainer = Trainer(Model(2, 1), given, train_dataset=[{"x": torch.ones(2)}] * 8)
    trainer.train(resume_from_checkpoint=value)
outcomes = []
for number, value in enumerate(json.loads(sys.argv[2])):
    if number == 1:
        resume(1)
    try:
        resume(2, value)
        outcomes.append("trained")
    except (ValueError, OSError) as error:
        outcomes.append(type(error).__name__)
print(json.dumps(outcomes))
"""


def test_a_checkpoint_is_missing_where_the_trainer_finds_none(run: Callable[..., Any], tmp_path: Path) -> None:
    saved, out = tmp_path / "out/checkpoint-1", str(tmp_path / "out")
    values = [True, False, str(saved), True, out, str(tmp_path / "gone"), None]
    before = [finding.id for finding in starting.checkpoint(resuming(True, out), trains=True)]
    done = run(["python", "-c", RESUMES, out, json.dumps(values)], cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    fails = [outcome != "trained" for outcome in json.loads(done.stdout.splitlines()[-1])]
    assert fails == [True, False, False, False, True, True, False]
    assert before == ["checkpoint-missing"]
    found = [list(starting.checkpoint(resuming(value, out), trains=True)) for value in values[1:]]
    assert [bool(one) for one in found] == fails[1:]
    assert f"such as {saved.with_name('checkpoint-2')}." in found[3][0].message
    assert "gone/checkpoint-500." in found[4][0].message


def resuming(value: Any, output_dir: str, **changes: Any) -> RunDescription:
    given = {"model_name_or_path": "m", "do_train": True, "output_dir": output_dir, "resume_from_checkpoint": value}
    return from_arguments(given | changes, software=Software(torch="2.9.1"), origin="a.yaml")


def test_a_checkpoint_that_is_not_read_is_not_looked_for() -> None:
    for changes in ({"do_train": False}, {"stage": "rm", "finetuning_type": "full"}):
        assert list(starting.checkpoint(resuming("gone", "out", **changes), trains=True)) == []
    assert list(starting.checkpoint(resuming("gone", "out"), trains=False)) == []


@pytest.mark.parametrize("name", ["use_galore", "use_apollo"])
def test_the_optimizers_of_galore_and_apollo_are_llamafactorys(name: str) -> None:
    source = inspect.getsource(getattr(trainer_utils, f"_create_{name.removeprefix('use_')}_optimizer"))
    wrapped = re.findall(r"training_args\.optim (?:==|in) (.+):", source)
    theirs = {optim for each in wrapped for optim in re.findall(r'"(\w+)"', each)}
    assert theirs == set(arguments.LOW_RANK_OPTIMIZERS[name])
    run = replace(RUN, **{name: True, "finetuning_type": "full"})
    for optim in (*theirs, "adamw_torch_fused"):
        found = list(arguments.low_rank_optimizer(replace(run, optim=optim)))
        assert [finding.set for finding in found] == ([] if optim in theirs else [{"optim": "adamw_torch"}])


@pytest.mark.parametrize("kind", ["lora", "full", "freeze", "oft"])
@pytest.mark.parametrize(
    "settings", [{"use_galore": True}, {"use_apollo": True}, {"use_badam": True}, {"loraplus_lr_ratio": 16.0}, {},
                 {"use_badam": True, "loraplus_lr_ratio": 16.0}]
)  # fmt: skip
def test_methods_that_llamafactory_refuses_together_are_refused(kind: str, settings: dict[str, Any]) -> None:
    def refuses(check: Callable[[], object]) -> bool:
        try:
            check()
        except (ValueError, UserError):
            return True
        return False

    ours = refuses(lambda: contradictions.refuse(replace(RUN, finetuning_type=kind, **settings)))
    assert ours == refuses(lambda: FinetuningArguments(finetuning_type=kind, **settings))


def test_a_small_data_set_makes_a_smaller_batch_in_one_process_only() -> None:
    batches = BatchSampler(SequentialSampler(range(3)), batch_size=8, drop_last=False)
    assert [len(batch) for batch in batches] == [3]
    for rank in range(2):
        assert [len(batch) for batch in BatchSamplerShard(batches, num_processes=2, process_index=rank)] == [8]
