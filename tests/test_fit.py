"""What `--fit` changes: enough, no more than it may, and only what is written down."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llamafactory_preflight import cli, memory, report
from llamafactory_preflight.advice import yaml_text
from llamafactory_preflight.advice.remedies import Remedy
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.fitting import fit, judgement
from llamafactory_preflight.result import Result
from llamafactory_preflight.run import RunDescription, from_arguments
from llamafactory_preflight.settings import ALLOWABLE
from llamafactory_preflight.software import Software
from test_remedies import FRACTIONS, SETTINGS, SIZES, SOFTWARE, arguments, shape


GIB = 2**30
EVERYTHING = frozenset(ALLOWABLE)
MAY_NOT_CHANGE = {"quantization_bit", "cutoff_len", "bf16", "pure_bf16", "finetuning_type"}
YAML = """\
# mine
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
template: qwen3
cutoff_len: 4096  # long
per_device_train_batch_size: 8
bf16: true
output_dir: saves/x
"""


def looked_at(run: RunDescription, size: str, budget: int) -> Result:
    """A preflight of a run that gets `budget` bytes of a card."""
    card = Device(name="card", total_bytes=80 * GIB, free_bytes=budget)
    estimate = memory.estimate(run, shape(size), software=SOFTWARE)
    return Result(
        origin="test", run=run, software=SOFTWARE, shape=shape(size), estimate=estimate, device=card, devices=(card,),
        host_budget_bytes=None, verdict=judgement.judge(estimate, card, None), findings=(), resolved=(),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    result: Result
    within_bounds: Remedy | None
    with_all: Remedy | None


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Runs that do not fit, as they are changed by default and with all allowed."""
    out = []
    folder = tmp_path_factory.mktemp("out")
    for size, settings, fraction in itertools.product(SIZES, SETTINGS, FRACTIONS):
        run = from_arguments(arguments(settings, folder), software=SOFTWARE, origin="test")
        run = dataclasses.replace(run, use_cpu=False)
        largest = max(memory.estimate(run, shape(size), software=SOFTWARE).phases.values())
        result = looked_at(run, size, int(largest * fraction))
        out.append(
            Case(
                result=result,
                within_bounds=fit.fitting(result, allow=frozenset()),
                with_all=fit.fitting(result, allow=EVERYTHING),
            )
        )
    return out


def verdict_with(case: Case, remedy: Remedy) -> str:
    """What preflight says of the changed run, from the beginning."""
    assert case.result.device is not None and case.result.shape is not None
    changed = dataclasses.replace(case.result.run, **remedy.set)
    estimate = memory.estimate(changed, case.result.shape, software=SOFTWARE)
    return judgement.judge(estimate, case.result.device, None).word


def test_at_least_thirty_runs_that_do_not_fit_end_in_one_that_does(cases: list[Case]) -> None:
    fitted = [case for case in cases if case.with_all is not None]
    assert all(case.result.verdict.word != "fits" for case in cases)
    assert len(fitted) >= 30
    assert {verdict_with(case, case.with_all) for case in fitted if case.with_all} == {"fits"}


def test_what_is_not_allowed_stays_and_so_does_the_effective_batch(cases: list[Case]) -> None:
    changed = [(case, case.within_bounds) for case in cases if case.within_bounds is not None]
    assert len(changed) >= 30
    for case, remedy in changed:
        assert not MAY_NOT_CHANGE & remedy.set.keys()
        assert remedy.set.get("optim", "adamw_torch_fused") == "adamw_torch_fused"
        assert verdict_with(case, remedy) == "fits"
    for case in cases:
        for found in (case.within_bounds, case.with_all):
            after = dataclasses.replace(case.result.run, **(found.set if found else {}))
            batches = [
                run.per_device_train_batch_size * run.gradient_accumulation_steps for run in (case.result.run, after)
            ]
            assert batches[0] == batches[1]


def test_an_allowed_name_brings_runs_that_nothing_else_could(cases: list[Case]) -> None:
    only_with_all = [case for case in cases if case.within_bounds is None and case.with_all is not None]
    assert only_with_all
    assert all(case.with_all and MAY_NOT_CHANGE | {"optim"} & case.with_all.set.keys() for case in only_with_all)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "a.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def preflight_of(*words: str) -> int:
    return cli.main(["preflight", *words])


def test_the_written_file_fits_and_keeps_order_and_comments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_of("a.yaml", "--gpu", "24GiB") == 1
    assert preflight_of("a.yaml", "--gpu", "24GiB", "--fit", "-o", "b.yaml") == 0
    assert "Changed: " in capsys.readouterr().err
    assert preflight_of("b.yaml", "--gpu", "24GiB") == 0
    assert "FITS" in capsys.readouterr().out
    before, after = YAML.splitlines(), (folder / "b.yaml").read_text().splitlines()
    assert after[: len(before)][:8] == before[:8]
    assert any(line.endswith("# was 8") for line in after)


def test_a_file_that_is_there_is_only_overwritten_with_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "b.yaml").write_text("mine: true\n")
    words = ("a.yaml", "--gpu", "24GiB", "--fit", "-o", "b.yaml")
    assert preflight_of(*words) == 2
    assert capsys.readouterr() == ("", "b.yaml exists already. Nothing was written; --force overwrites it.\n")
    assert (folder / "b.yaml").read_text() == "mine: true\n"
    assert preflight_of(*words, "--force") == 0
    assert "mine: true" not in (folder / "b.yaml").read_text()
    assert not list(folder.glob(".b.yaml*"))


def test_figures_of_the_preset_do_not_stand_above_what_was_changed(
    folder: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    preset = root / "presets/24gb_lora.yaml"
    assert "# Measured: " in preset.read_text()
    words = (str(preset), "model_name_or_path=model", "--fit", "--allow", "quantization")
    assert preflight_of(*words, "--gpu", "12GiB", "-o", "smaller.yaml") == 0
    head = (folder / "smaller.yaml").read_text().split("\n\n")[0].splitlines()
    assert head[0].startswith("# 24gb_lora.yaml, changed by llamafactory-cli preflight --fit.")
    assert head[1] == "# Run: llamafactory-cli train smaller.yaml"
    assert [line for line in head if "Measured" in line or "Tokens" in line or "24 GB" in line] == []
    assert head[2:] == [line for line in preset.read_text().splitlines() if line.startswith("# Needs ")]
    assert preflight_of(str(preset), "--gpu", "80GiB", "--fit", "-o", "same.yaml") == 0
    assert (folder / "same.yaml").read_text() == preset.read_text()


def test_the_command_in_a_changed_preset_can_be_pasted() -> None:
    text = yaml_text.renamed("# A\n# Measured: 1\n\na: 1\n", source="a.yaml", output="my own/b.yaml", command="x")
    assert "# Run: llamafactory-cli train 'my own/b.yaml'\n" in text


def test_where_nothing_allowed_fits_it_says_so_and_exits_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preflight_of("a.yaml", "--gpu", "12GiB", "--fit", "-o", "b.yaml") == 1
    assert "Nothing that may be changed makes it fit" in capsys.readouterr().err
    assert not (folder / "b.yaml").exists()
    assert preflight_of("a.yaml", "--gpu", "12GiB", "--fit", "--allow", "quantization", "-o", "b.yaml") == 0
    assert yaml.safe_load((folder / "b.yaml").read_text())["quantization_bit"] == 4


def test_what_fits_is_not_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_of("a.yaml", "cutoff_len=512", "--gpu", "80GiB", "--fit", "-o", "b.yaml") == 0
    assert "Changed" not in capsys.readouterr().err
    assert yaml.safe_load((folder / "b.yaml").read_text()) == yaml.safe_load(YAML) | {"cutoff_len": 512}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("a.yaml", "--fit", "--allow", "batch"), "'batch' cannot be allowed"),
        (("-", "--fit", "-o", "b.yaml"), "-o needs a YAML file"),
        (("-", "--tune", "-o", "b.yaml"), "-o needs a YAML file"),
        (("a.yaml", "--fit", "-o", "-"), "-o writes YAML"),
        (("a.yaml", "--fit", "-o", "b.json"), "-o writes YAML"),
        (("a.yaml", "--fit", "-o", "/dev/full", "--force"), "-o writes YAML"),
        (("a.yaml", "--fit", "--method", "lora"), "--method goes with --model"),
        (("a.yaml", "--tune", "--allow", "cutoff"), "--allow goes with --fit"),
        (("--model", "model", "--method", "", "--gpu", "24GiB"), "--method  is not known"),
        (("a.yaml", "a.yaml", "--fit"), "one file at a time"),
        (("a.yaml", "--fit", "-o", "no/such/b.yaml", "--gpu", "24GiB"), "cannot be written"),
        (("a.yaml", "--fit", "-o", "model", "--gpu", "24GiB"), "model is a folder"),
        (("a.yaml", "--force", "--gpu", "24GiB"), "go with --fit, --tune or --model"),
        (("a.yaml", "-o", "b.yaml", "--gpu", "24GiB"), "go with --fit, --tune or --model"),
        (("a.yaml", "--allow", "cutoff", "--gpu", "24GiB"), "go with --fit, --tune or --model"),
        (("a.yaml", "--fit", "--exact", "--gpu", "24GiB"), "--exact simulates a run as it is"),
        (("--model", "", "--gpu", "24GiB"), "--model is empty"),
        (("--model", "model", "--method", "magic", "--gpu", "24GiB"), "--method magic is not known"),
        (("--model", "model", "cutoff_len", "--gpu", "24GiB"), "take one file at a time, or --model"),
        (("--model", "nowhere", "--gpu", "24GiB", "--tune", "-o", "b.yaml"), "No preset was made"),
    ],
)
def test_faulty_input_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert preflight_of(*words) == 2
    assert reason in capsys.readouterr().err


def test_values_are_replaced_where_they_stand_and_others_are_added() -> None:
    text = "a: 1  # one\nb:  true\n# c: 5\nnested:\n  a: 7\n"
    new = yaml_text.changed(text, {"a": 2, "b": False, "c": "x"}, reason="added")
    assert yaml.safe_load(new) == {"a": 2, "b": False, "c": "x", "nested": {"a": 7}}
    assert new.splitlines()[:2] == ["a: 2  # was 1; one", "b:  false  # was true"] and "# c: 5" in new


@pytest.mark.parametrize(
    ("text", "changes", "kept"),
    [
        ("a:\n  8\nb: 1  # one\n", {"a": 4}, "b: 1  # one"),
        ('"a": 16\n# mine\nb: 1', {"a": 8, "d": 1}, "# mine"),
        ("a: >\n  long\n  text\nb: 1\n", {"a": "x"}, "b: 1"),
        ("a: [1, 2]\nb:\n- x\n- y\n", {"a": "z", "b": "q"}, ""),
        ("a:\n# mine\nb: 2\n", {"a": 3}, "# mine"),
        ("a: 1\r\nb: 2\r\n", {"a": 3, "c": 4}, "b: 2"),
        ("\ufeffa: 1\nb: 2\n", {"a": 3}, "b: 2"),
        ("a: &r 8\nb: *r\n", {"b": 3}, ""),
        ("{a: 1, b: 2}", {"a": 3, "c": 1}, ""),
        ("# mine\n{a: 1, b: 2}  # and mine\n", {"a": 3, "c": 1}, "# mine\n# and mine\n"),
        ("---\na: 1  # 'mine' # too\n...\n", {"c": 2}, "# 'mine' # too"),
        ("a:\n- x  # mine\n- y\nb: '#1'  # mine too\n", {"a": "z"}, "# mine\n# mine too\n"),
    ],
)
def test_every_form_of_yaml_stays_right(text: str, changes: dict[str, object], kept: str) -> None:
    new = yaml_text.changed(text, changes, reason="added")
    assert yaml.safe_load(new) == yaml.safe_load(text) | changes
    assert kept in new


def test_a_value_that_is_already_there_keeps_its_comment() -> None:
    assert yaml_text.changed("a: 1  # one\n", {"a": 1}, reason="added") == "a: 1  # one\n"


def test_arguments_are_written_as_the_command_line_has_them() -> None:
    changed = {"cutoff_len": 512, "bf16": False}
    assert fit.as_arguments(changed, flags=False) == ["cutoff_len=512", "bf16=false"]
    assert fit.as_arguments(changed, flags=True) == ["--cutoff_len", "512", "--bf16", "false"]


def test_fit_needs_neither_torch_nor_llamafactory() -> None:
    code = "import sys; import llamafactory_preflight.commands.fit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_allowable_name_keeps_something() -> None:
    assert set(fit.KEPT) == set(ALLOWABLE)
    names: set[str] = set().union(*fit.KEPT.values())
    assert names <= {field.name for field in dataclasses.fields(RunDescription)}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("a.yaml", "per_device_train_batch_size=1", "--gpu", "80GiB", "--host-ram", "1MiB"), "Main memory: about"),
        (("a.yaml", "use_cpu=true", "--host-ram", "1GiB"), "this one is on the CPU"),
        (("chat.yaml", "--gpu", "8GiB"), "arguments of a chat"),
    ],
)
def test_why_nothing_was_changed_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    (folder / "chat.yaml").write_text("model_name_or_path: model\ntemplate: qwen3\n")
    assert preflight_of(*words, "--fit") == 1
    said = capsys.readouterr().err
    assert reason in said and "--allow" not in said


def test_fit_says_what_main_memory_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight_of("a.yaml", "--gpu", "24GiB", "--host-ram", "1GiB", "--fit") == 0
    said = capsys.readouterr().err
    assert "Changed: " in said and "1.00 GiB available" in said


def two_cards(run: RunDescription, size: str, budget: int, software: Software) -> Result:
    alone = looked_at(run, size, budget)
    assert alone.device is not None and alone.shape is not None
    estimate = memory.estimate(run, alone.shape, software=software, ranks=memory.Ranks(world=2, local=2))
    return dataclasses.replace(alone, software=software, estimate=estimate, devices=(alone.device, alone.device))


def test_several_gpus_share_optimizer_states_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, finetuning_type="full", cutoff_len=2048)
    with_deepspeed = dataclasses.replace(SOFTWARE, deepspeed="0.18.4")
    found = fit.fitting(two_cards(run, "1.7b", 24 * GIB, with_deepspeed), allow=frozenset())
    assert found is not None and str(found.set["deepspeed"]).startswith("deepspeed_configs/zero")
    assert not MAY_NOT_CHANGE & found.set.keys()
    assert fit.fitting(two_cards(run, "1.7b", 24 * GIB, SOFTWARE), allow=frozenset()) is None
    alone = dataclasses.replace(looked_at(run, "1.7b", 24 * GIB), software=with_deepspeed)
    assert fit.fitting(alone, allow=frozenset()) is None, "LLaMA-Factory takes DeepSpeed under torchrun only"
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    offloaded = fit.fitting(alone, allow=frozenset())
    assert offloaded is not None and "offload" in str(offloaded.set["deepspeed"])
    little = dataclasses.replace(alone, host_budget_bytes=2 * GIB)
    assert fit.fitting(little, allow=frozenset()) is None, "main memory would not hold it"


def test_a_run_that_lacks_main_memory_alone_is_left_as_it_is() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, per_device_train_batch_size=8)
    on_card = looked_at(run, "8b", 80 * GIB)
    assert on_card.verdict.word == "fits"
    assert fit.fitting(dataclasses.replace(on_card, host_budget_bytes=1), allow=EVERYTHING) is None


def test_nothing_is_moved_to_main_memory_that_does_not_hold_it() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, finetuning_type="full", optim="adamw_torch")
    plain = looked_at(run, "8b", 0)
    assert plain.estimate is not None
    moved = dataclasses.replace(run, optim="paged_adamw_8bit", use_unsloth_gc=True)
    predicted = judgement.predictor(plain)(moved)
    assert predicted.host_bytes > plain.estimate.host_bytes
    for budget in (None, predicted.host_bytes):
        assert judgement.predictor(dataclasses.replace(plain, host_budget_bytes=budget))(moved) == predicted
    for budget in (predicted.host_bytes - 1, 1):
        predict = judgement.predictor(dataclasses.replace(plain, host_budget_bytes=budget))
        assert predict(run) == plain.estimate
        with pytest.raises(Unmodelled, match="Main memory"):
            predict(moved)


def test_a_fit_that_main_memory_does_not_hold_says_so() -> None:
    run = RunDescription(model_name_or_path="m", do_train=True, bf16=True, per_device_train_batch_size=8)
    result = dataclasses.replace(looked_at(run, "8b", 40 * GIB), host_budget_bytes=1)
    remedy = fit.fitting(result, allow=EVERYTHING)
    assert remedy is not None
    said = [
        report.fitted(remedy, judgement.judge_with_host(remedy.estimate, result.device, budget))
        for budget in (1, 2**50)
    ]
    assert ["main memory" in text for text in said] == [True, False]
