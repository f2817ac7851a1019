from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamafactory_preflight.arguments import paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def make_data(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(json.dumps({name: {"file_name": f"{name}.json"} for name in names}))
    return folder


def test_what_exists_as_written_stays(here: Path, tmp_path: Path) -> None:
    make_data(here / "data", "mine")
    make_data(tmp_path / "beside" / "data", "mine")
    (here / "ds.json").write_text("{}")
    given = {"dataset": "mine", "deepspeed": "ds.json"}
    assert paths.resolve(given, beside=tmp_path / "beside") == (given, ())


def test_a_file_beside_the_yaml_is_found(here: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "beside" / "data", "mine")
    (tmp_path / "beside" / "ds.json").write_text("{}")
    given = {"dataset": "mine", "dataset_dir": "data", "deepspeed": "ds.json", "lora_rank": 8}
    changed, sentences = paths.resolve(given, beside=tmp_path / "beside")
    assert changed == given | {"dataset_dir": str(data), "deepspeed": str(tmp_path / "beside" / "ds.json")}
    assert len(sentences) == 2 and all("beside the file" in sentence for sentence in sentences)


def test_a_data_folder_without_the_named_data_set_is_passed_over(here: Path) -> None:
    make_data(here / "data", "other")
    changed, (sentence,) = paths.resolve({"dataset": "identity"}, beside=None)
    assert "identity" in paths.datasets_in(Path(changed["dataset_dir"]))
    assert "in the installed pack" in sentence


def test_a_data_folder_must_have_all_the_named_data_sets(here: Path) -> None:
    given = {"dataset": "identity, mine", "dataset_dir": "data"}
    assert paths.resolve(given, beside=None) == (given, ())


@pytest.mark.parametrize("folder", ["ONLINE", "REMOTE:someone/data", "/does/not/exist"])
def test_what_is_no_relative_path_is_left_alone(here: Path, folder: str) -> None:
    given = {"dataset": "identity", "dataset_dir": folder, "deepspeed": '{"zero_optimization": {}}'}
    assert paths.resolve(given, beside=here) == (given, ())


def test_what_is_found_nowhere_stays_for_llamafactory_to_report(here: Path) -> None:
    given = {"deepspeed": "no/such.json"}
    assert paths.resolve(given, beside=here) == (given, ())


def test_the_pack_has_presets() -> None:
    pack = paths.pack_folder()
    assert pack is not None
    assert (pack / "presets" / "cpu_smoke.yaml").is_file()
