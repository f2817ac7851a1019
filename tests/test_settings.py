from __future__ import annotations

import pytest

from llamafactory_preflight import handoff
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.failing import fail_open
from llamafactory_preflight.fixer import points
from llamafactory_preflight.fixer.around import repairing
from llamafactory_preflight.settings import VARIABLES, Settings, unset_faulty


def test_defaults_also_for_empty_variables() -> None:
    assert Settings.from_environment({}) == Settings(mode="block", template="fix", gpu=None)
    assert Settings.from_environment({"LLAMAFACTORY_PREFLIGHT": "", "LLAMAFACTORY_PREFLIGHT_GPU": " "}) == Settings()


@pytest.mark.parametrize("mode", ["block", "warn", "fit", "off", " OFF "])
def test_modes(mode: str) -> None:
    assert Settings.from_environment({"LLAMAFACTORY_PREFLIGHT": mode}).mode == mode.strip().lower()


def test_the_two_switches_are_independent() -> None:
    settings = Settings.from_environment({"LLAMAFACTORY_PREFLIGHT": "off", "LLAMAFACTORY_PREFLIGHT_GPU": "24GiB"})
    assert (settings.mode, settings.template, settings.gpu) == ("off", "fix", "24GiB")


@pytest.mark.parametrize("variable", ["LLAMAFACTORY_PREFLIGHT", "LLAMAFACTORY_TEMPLATE"])
def test_a_mode_that_does_not_exist(variable: str) -> None:
    with pytest.raises(UserError, match=f"{variable}=blok is not a mode"):
        Settings.from_environment({variable: "blok"})


def test_the_step_of_a_snapshot_is_a_number() -> None:
    assert Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_SNAPSHOT": "3"}).snapshot == 3
    assert Settings.from_environment({}).snapshot is None
    for text in ("0", "three", "-1", "1.5"):
        with pytest.raises(UserError, match="not the number of a step"):
            Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_SNAPSHOT": text})


def test_a_faulty_switch_counts_as_not_set_and_the_others_stay() -> None:
    given = {"LLAMAFACTORY_PREFLIGHT_SNAPSHOT": "x", "LLAMAFACTORY_TEMPLATE": "wran", "LLAMAFACTORY_PREFLIGHT": "warn"}
    said = [str(fault) for fault in unset_faulty(given)]
    assert given == {"LLAMAFACTORY_PREFLIGHT": "warn"} and len(said) == 2
    assert "LLAMAFACTORY_TEMPLATE=wran is not a mode" in said[0] and "not the number of a step" in said[1]
    assert list(unset_faulty(given)) == [] and list(unset_faulty({"LLAMAFACTORY_PREFLIGHT": " "})) == []


def test_what_fit_may_change_is_one_of_the_names() -> None:
    read = Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_ALLOW": "cutoff, quantization"})
    assert read.allow == {"cutoff", "quantization"}
    with pytest.raises(UserError, match="'batch' cannot be allowed"):
        Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_ALLOW": "batch"})


@pytest.mark.parametrize("variable", ["LLAMAFACTORY_PREFLIGHT", "LLAMAFACTORY_PREFLIGHT_SNAPSHOT"])
def test_a_faulty_switch_turns_off_neither_the_check_nor_the_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    for name in (*VARIABLES, handoff.WARNED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "ture")
    asked = repairing("processor_of_model")(lambda *_: "original")
    monkeypatch.setattr(points, "processor_of_model", lambda *_: "repaired", raising=False)
    assert fail_open(lambda: "checked", "left out") == "checked" and asked() == "repaired"
    said = capsys.readouterr().err
    assert said.count(f"{variable}=ture is not ") == 1 and "For now it counts as not set." in said
