"""The subcommands as users call them: real processes of the real `llamafactory-cli`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import llamafactory_preflight.preflight
from llamafactory_preflight import cli


Run = Callable[..., subprocess.CompletedProcess[str]]
QWEN3_0_6B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28, "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
}  # fmt: skip
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_0_6B))
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: model\nstage: sft\ndo_train: true\nfinetuning_type: lora\ntemplate: qwen3\n"
        "dataset: identity\ncutoff_len: 2048\nper_device_train_batch_size: 4\nbf16: true\noutput_dir: out\n"
    )
    return tmp_path


@pytest.fixture
def preflight(run: Run, folder: Path) -> Run:
    def call(
        *arguments: str, env: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        return run(["llamafactory-cli", "preflight", *arguments], cwd=folder, env=NO_GPU | (env or {}), **options)

    return call


@pytest.mark.parametrize(("gpu", "word", "code"), [("80GiB", "fits", 0), ("4GiB", "will_not_fit", 1)])
def test_a_verdict_in_json(preflight: Run, gpu: str, word: str, code: int) -> None:
    done = preflight("a.yaml", "--gpu", gpu, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    report = json.loads(done.stdout)
    assert report["verdict"] == word
    assert sum(report["gpu"]["components"].values()) == report["gpu"]["peak_allocated_bytes"]
    assert report["gpu"]["low_bytes"] <= report["gpu"]["peak_allocated_bytes"] <= report["gpu"]["high_bytes"]


def test_a_verdict_in_text_and_overrides(preflight: Run) -> None:
    done = preflight("a.yaml", "cutoff_len=64", "per_device_train_batch_size=1", "--free", "4GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "64 tokens" in done.stdout and "FITS" in done.stdout


def test_python_m_is_the_same(preflight: Run, run: Run, folder: Path, scripts_on_path: Path) -> None:
    options = ["a.yaml", "--gpu", "24GiB", "--json"]
    module = run(
        [scripts_on_path / "python", "-m", "llamafactory_preflight", "check", *options], cwd=folder, env=NO_GPU
    )
    cli = preflight(*options)
    ours, theirs = json.loads(module.stdout), json.loads(cli.stdout)
    assert module.returncode == cli.returncode
    for report in (ours, theirs):
        report["host"].pop("budget_bytes")  # changes from one moment to the next
    assert ours == theirs


def test_standard_input(preflight: Run, folder: Path) -> None:
    done = preflight("-", "--gpu", "80GiB", input=(folder / "a.yaml").read_text())
    assert done.returncode == 0
    assert "standard input" in done.stdout


def test_several_files_give_one_report_each_and_the_worst_code(preflight: Run, folder: Path) -> None:
    (folder / "b.yaml").write_text((folder / "a.yaml").read_text() + "lora_rnk: 8\n")
    done = preflight("a.yaml", "b.yaml", "a.yaml", "--gpu", "80GiB", "--json")
    assert done.returncode == 2
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["file"] for report in reports] == ["a.yaml", "b.yaml", "a.yaml"]
    assert [report["verdict"] for report in reports] == ["fits", "unknown", "fits"]


FAULTS = {
    "no file": (["nope.yaml", "--gpu", "24GiB"], "nope.yaml does not exist"),
    "not yaml": (["not.yaml", "--gpu", "24GiB"], "not.yaml is not YAML"),
    "a list": (["list.yaml", "--gpu", "24GiB"], "list.yaml holds a list"),
    "unknown key": (["a.yaml", "lora_rnk=8", "--gpu", "24GiB"], "Write `lora_rank`"),
    "wrong type": (
        ["a.yaml", "lora_rank=many", "--gpu", "24GiB"],
        "`lora_rank` is 'many', not a whole number (the command line)",
    ),
    "no tiny model": (
        ["a.yaml", "model_name_or_path=saves/tiny-qwen3", "--gpu", "24GiB"],
        "build_tiny_model.py --link",
    ),
    "no config.json": (["a.yaml", "model_name_or_path=.", "--gpu", "24GiB"], "has no config.json"),
    "no deepspeed file": (["a.yaml", "deepspeed=no.json", "--gpu", "24GiB"], "no.json does not exist"),
    "malformed deepspeed file": (["a.yaml", "deepspeed=bad.json", "--gpu", "24GiB"], "bad.json is not readable JSON"),
    "below zero": (["a.yaml", "--gpu", "-3GiB"], "'-3GiB' is not an amount of memory (--gpu)"),
    "no GPUs": (["a.yaml", "--gpu", "24GiB", "--gpus", "0"], "--gpus 0 is not a number of GPUs"),
    "no such GPU": (["a.yaml", "--device", "99"], "--device 99 does not exist"),
    "a long override": (["a.yaml", f"model_name_or_path={'x' * 300}/y", "--gpu", "24GiB"], "does not exist"),
    "no unit": (["a.yaml", "--gpu", "24"], "'24' has no unit (--gpu). Write 24GiB."),
    "neither GPU nor plan": (["a.yaml"], "no GPU here"),
    "no file at all": (["--gpu", "24GiB"], "No file is given"),
    "only overrides": (["a=1", "--gpu", "24GiB"], "No file is given"),
    "unknown option": (["a.yaml", "--gpus", "two"], "invalid int value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_input_is_one_message_and_code_2(preflight: Run, folder: Path, fault: str) -> None:
    (folder / "not.yaml").write_text("a: b: c")
    (folder / "list.yaml").write_text("- a\n- b\n")
    (folder / "bad.json").write_text("{")
    arguments, message = FAULTS[fault]
    done = preflight(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        ("| true; exit ${PIPESTATUS[0]}", ""),  # a reader that has seen enough
        (">/dev/full", "The output or the working folder cannot be used: No space left on device.\n"),
    ],
)
def test_output_that_nobody_takes(run: Run, folder: Path, redirection: str, message: str) -> None:
    done = run(["bash", "-c", f"llamafactory-cli preflight a.yaml --gpu 80GiB {redirection}"], cwd=folder)
    assert (done.returncode, done.stderr) == (2, message)


def test_a_terminal_without_the_letters_of_a_path(preflight: Run, folder: Path) -> None:
    (folder / "参数.yaml").write_text((folder / "a.yaml").read_text())
    done = preflight("参数.yaml", "--gpu", "80GiB", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u53c2" in done.stdout


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ZeroDivisionError("by zero"), 2)])
def test_an_interrupt_and_a_fault_of_ours_are_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(llamafactory_preflight.preflight, "check", fail)
    assert cli.main(["preflight", "a.yaml"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("llamafactory-preflight has a fault: ZeroDivisionError: by zero") is (code == 2)
    assert len(captured.err.splitlines()) == (code == 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"model_type": "unheard_of"}}, "unheard_of"),
        ({"override": "model_name_or_path=someone/tiny"}, "cannot be reached"),
        ({"override": "deepspeed=ds.json"}, "FORCE_TORCHRUN=1 llamafactory-cli train a.yaml"),
    ],
)
def test_what_cannot_be_told_is_a_report_with_code_2(
    preflight: Run, folder: Path, change: dict[str, object], message: str
) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    if "config" in change:
        (folder / "model" / "config.json").write_text(json.dumps(change["config"]))
    options = [str(change["override"])] if "override" in change else []
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}
    done = preflight("a.yaml", *options, "--gpu", "80GiB", env=env)
    assert (done.returncode, done.stderr) == (2, "")
    assert message in " ".join(done.stdout.split())


def test_names_that_stand_for_nothing_are_errors_below_the_report(preflight: Run, folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    done = preflight("a.yaml", "dataset=rowz", "template=qwen33", "--gpu", "80GiB", "--json")
    assert (done.returncode, done.stderr) == (2, "")
    report = json.loads(done.stdout)
    assert report["verdict"] == "fits"
    errors = {found["id"]: found["message"] for found in report["findings"] if found["severity"] == "error"}
    assert errors.keys() == {"data-set-unknown", "template-unknown"}
    assert "data/dataset_info.json has no `rowz`, which `dataset` names. It has rows" in errors["data-set-unknown"]


def test_a_preset_for_two_cards_says_how_to_plan_for_them(preflight: Run, folder: Path) -> None:
    for name in ("2x24gb_lora", "2x24gb_full_zero2"):
        (folder / f"{name}.yaml").write_text((folder / "a.yaml").read_text())
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    with (folder / "2x24gb_full_zero2.yaml").open("a") as file:
        file.write("deepspeed: ds.json\n")
    files = ("2x24gb_lora.yaml", "2x24gb_full_zero2.yaml")
    done = preflight(*files, "--gpu", "80GiB", "--json")
    found = [[f for f in json.loads(line)["findings"] if f["id"] == "preset-for-more-gpus"] for line in
             done.stdout.splitlines()]  # fmt: skip
    assert [finding["severity"] for (finding,) in found] == ["warning", "error"]
    assert all("--gpus 2" in finding["message"] for (finding,) in found)
    two = preflight(*files, "--gpu", "80GiB", "--gpus", "2", "--json")
    assert "preset-for-more-gpus" not in two.stdout and "deepspeed-needs-torchrun" not in two.stdout


def test_extra_arguments_are_legal_when_allowed(preflight: Run) -> None:
    assert preflight("a.yaml", "mine=1", "--gpu", "80GiB", env={"ALLOW_EXTRA_ARGS": "1"}).returncode == 0


def test_it_answers_without_torch_transformers_or_more_of_llamafactory(
    run: Run, folder: Path, scripts_on_path: Path
) -> None:
    code = (
        "import sys; sys.argv = ['llamafactory-cli', 'preflight', 'a.yaml', '--gpu', '80GiB']\n"
        "import llamafactory.cli\n"
        "try: llamafactory.cli.main()\n"
        "except SystemExit as end: print(end.code)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'llamafactory.extras.misc', 'llamafactory.hparams'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = run([scripts_on_path / "python", "-c", code], cwd=folder, env=NO_GPU)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"], done.stdout + done.stderr


def test_help(run: Run, scripts_on_path: Path) -> None:
    overview = run([scripts_on_path / "python", "-m", "llamafactory_preflight", "--help"])
    assert (overview.returncode, len(overview.stdout.splitlines())) == (0, 4)
    done = run(["llamafactory-cli", "preflight", "--help"])
    assert done.returncode == 0
    assert "--host-ram" in done.stdout
    assert "Exit codes: 0 fits or tight" in done.stdout


def test_presets(run: Run, tmp_path: Path) -> None:
    listed = run(["llamafactory-cli", "presets"], cwd=tmp_path, env=NO_GPU)
    assert listed.returncode == 0
    assert "24gb_lora" in listed.stdout and "no GPU" in listed.stdout
    assert listed.stdout == run(["llamafactory-cli", "presets", "list"], cwd=tmp_path, env=NO_GPU).stdout
    shown = run(["llamafactory-cli", "presets", "show", "cpu_smoke"], cwd=tmp_path)
    copied = run(["llamafactory-cli", "presets", "copy", "cpu_smoke", "mine"], cwd=tmp_path)
    assert copied.returncode == 0
    assert (tmp_path / "mine" / "cpu_smoke.yaml").read_text() == shown.stdout
    missing = run(["llamafactory-cli", "presets", "show", "nope"], cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("There is no preset 'nope'. There are cpu_smoke, 12gb_")
    begun = run(["llamafactory-cli", "presets", "show", "24gb"], cwd=tmp_path)
    assert begun.stderr.startswith("There is no preset '24gb'. There are 24gb_dpo_qlora, 24gb_full, 24gb_lora, ")
    assert "16gb" not in begun.stderr and "2x24gb" not in begun.stderr


def test_doctor(run: Run) -> None:
    done = run(["llamafactory-cli", "doctor"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["startup", "hook", "live"]


def test_a_subcommand_that_does_not_exist(run: Run, scripts_on_path: Path) -> None:
    done = run([scripts_on_path / "python", "-m", "llamafactory_preflight", "nope"])
    assert done.returncode == 2
    assert "There is no subcommand 'nope'" in done.stderr
