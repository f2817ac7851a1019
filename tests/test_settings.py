from __future__ import annotations

import pytest

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.settings import Settings


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


def test_what_fit_may_change_is_one_of_the_names() -> None:
    read = Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_ALLOW": "cutoff, quantization"})
    assert read.allow == {"cutoff", "quantization"}
    with pytest.raises(UserError, match="'batch' cannot be allowed"):
        Settings.from_environment({"LLAMAFACTORY_PREFLIGHT_ALLOW": "batch"})
