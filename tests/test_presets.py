from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamafactory_preflight import cli, device, presets
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.commands import preset_table
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import qwen3_shapes


def test_every_yaml_of_the_pack_is_a_preset_smaller_cards_first(root: Path) -> None:
    found = presets.available()
    assert {preset.name for preset in found} == {file.stem for file in (root / "presets").glob("*.yaml")}
    order = [(preset.num_gpus, preset.tier_gb) for preset in found]
    assert order == sorted(order)
    assert all((preset.usable_bytes > 0) == (preset.tier != "any") for preset in found)


@pytest.mark.parametrize("name", ["cpu_smoke", "cpu_smoke.yaml"])
def test_find(name: str) -> None:
    assert presets.find(name).file.name == "cpu_smoke.yaml"


@pytest.mark.parametrize("name", ["nope", "../README", "", "presets/cpu_smoke"])
def test_find_what_is_not_there(name: str) -> None:
    with pytest.raises(UserError, match="cpu_smoke"):
        presets.find(name)


@pytest.mark.parametrize("name", ["24GB_LORA", "24gb-lora", "presets/24gb_lora.yaml", "24gb_lora.yml", "24gb_lorra"])
def test_a_name_that_is_almost_right_gets_the_right_one(name: str) -> None:
    with pytest.raises(UserError, match=r"There are .*24gb_lora\b") as raised:
        presets.find(name)
    assert "cpu_smoke" not in str(raised.value)


def test_a_copy_finds_everything_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "pack_folder", lambda pack=paths.pack_folder(): pack)
    for preset in presets.available():
        folder = tmp_path / preset.name
        files = presets.copy(preset.name, folder, force=False)
        text, original = (folder / preset.file.name).read_text(), preset.file.read_text()
        assert text.replace(f"train {preset.file.name}", f"train presets/{preset.file.name}") == original
        assert "presets/" not in text or preset.name == "cpu_smoke"
        assert all(file.is_file() and file.is_relative_to(folder) for file in files)
        resolved, _ = paths.resolve(preset.arguments, beside=folder)
        assert Path(resolved["dataset_dir"]) == folder / "data"
        if "deepspeed" in preset.arguments:
            assert Path(resolved["deepspeed"]).is_relative_to(folder)


def test_copying_twice_is_fine_and_a_changed_file_is_kept(tmp_path: Path) -> None:
    first = presets.copy("cpu_smoke", tmp_path, force=False)
    assert presets.copy("cpu_smoke", tmp_path, force=False)[0] == first[0]
    first[0].write_text("mine: true\n")
    with pytest.raises(UserError, match=r"cpu_smoke\.yaml exists already"):
        presets.copy("cpu_smoke", tmp_path, force=False)
    assert first[0].read_text() == "mine: true\n"
    presets.copy("cpu_smoke", tmp_path, force=True)
    assert first[0].read_bytes() == presets.find("cpu_smoke").file.read_bytes()


def test_presets_of_other_data_sets_are_copied_beside_each_other(tmp_path: Path) -> None:
    presets.copy("24gb_lora", tmp_path, force=False)
    presets.copy("12gb_dpo_lora", tmp_path, force=False)
    for name in ("24gb_lora", "12gb_dpo_lora"):
        assert paths.dataset_names(presets.find(name).arguments) <= paths.datasets_in(tmp_path / "data").keys()


def test_a_data_folder_with_these_data_sets_is_left_alone(tmp_path: Path) -> None:
    info = tmp_path / "data" / "dataset_info.json"
    info.parent.mkdir()
    info.write_text('{"identity": {"file_name": "mine.json"}, "other": {}}')
    presets.copy("cpu_smoke", tmp_path, force=False)
    assert "mine.json" in info.read_text()
    assert not (tmp_path / "data" / "identity.json").exists()


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_list_of_other_data_sets_stays_and_what_it_lacks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, force: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    info = tmp_path / "data" / "dataset_info.json"
    info.parent.mkdir()
    info.write_text('{"other": {}}')
    assert cli.main(["presets", "copy", "cpu_smoke", *force]) == 0
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["cpu_smoke.yaml", info.name]
    assert info.read_text() == '{"other": {}}'
    assert "data/dataset_info.json was left as it is. It has no identity" in capsys.readouterr().err


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    def full_disk(descriptor: int, mode: str) -> object:
        nonlocal written
        written += 1
        if written == 2:
            os.close(descriptor)
            raise OSError(28, "No space left on device")
        return real(descriptor, mode)

    real = os.fdopen
    monkeypatch.setattr(os, "fdopen", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        presets.copy("cpu_smoke", tmp_path / "new", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_what_cannot_be_replaced_is_told_and_nothing_written(tmp_path: Path, force: bool) -> None:
    (tmp_path / "cpu_smoke.yaml").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        presets.copy("cpu_smoke", tmp_path, force=force)
    assert [file.name for file in tmp_path.rglob("*")] == ["cpu_smoke.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is not a folder\. Nothing was written"):
        presets.copy("cpu_smoke", tmp_path / "file", force=force)
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").write_text("mine")
    with pytest.raises(UserError, match=r"other.data is not a folder"):
        presets.copy("cpu_smoke", other, force=force)
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe\.yaml is a device"):
        presets.put({pipe: b""}, pipe, force=force)
    assert pipe.is_fifo()


def test_a_link_to_nothing_stands_in_the_way_until_force(tmp_path: Path) -> None:
    (tmp_path / "cpu_smoke.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "12gb_lora.yaml").symlink_to("12gb_lora.yaml")
    for name in ("cpu_smoke", "12gb_lora"):
        with pytest.raises(UserError, match=rf"{name}\.yaml exists already"):
            presets.copy(name, tmp_path, force=False)
        presets.copy(name, tmp_path, force=True)
        assert presets.copy(name, tmp_path, force=False)[0] == tmp_path / f"{name}.yaml"
        assert not (tmp_path / f"{name}.yaml").is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_permission(**_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".cpu_smoke.yaml.x"))

    monkeypatch.setattr(tempfile, "mkstemp", no_permission)  # root may write everywhere
    with pytest.raises(UserError, match=r"cpu_smoke\.yaml cannot be used: Permission denied") as raised:
        presets.copy("cpu_smoke", tmp_path, force=False)
    assert ".cpu_smoke.yaml.x" not in str(raised.value)


def test_a_data_file_of_ours_that_is_gone_comes_back_and_a_changed_one_stays(tmp_path: Path) -> None:
    presets.copy("24gb_lora", tmp_path, force=False)
    (tmp_path / "data/identity.json").unlink()
    (tmp_path / "data/dpo_en_demo.json").write_text("[]")
    for force in (False, True):
        presets.copy("24gb_qlora", tmp_path, force=force)
        assert (tmp_path / "data/identity.json").is_file()
        assert (tmp_path / "data/dpo_en_demo.json").read_text() == "[]"


@pytest.mark.parametrize(
    ("free_gib", "num_gpus", "said"),
    [(24, 1, "fits, as measured"), (20, 1, "will not fit, as measured"), (24, 2, "needs 2 GPUs")],
)
def test_without_the_model_the_list_goes_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: int, num_gpus: int, said: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    card = Device(name="card", total_bytes=24 * GIB, free_bytes=free_gib * GIB, compute_capability=(8, 6))
    monkeypatch.setattr(device, "visible", lambda: (card,))
    measured = presets.Measured(peak_bytes=int(20.5 * GIB), tokens_per_second=None, gpu="another card")
    known = presets.find("24gb_lora")
    given = {**known.arguments, "model_name_or_path": "someone/else"}
    preset = replace(known, arguments=given, num_gpus=num_gpus, measured=measured)
    assert preset_table.lines([preset])[1].endswith(f"20.50 GiB  -     {said}")


def test_the_list_says_which_presets_a_card_without_bf16_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device(name="T4", total_bytes=15 * GIB, free_bytes=15 * GIB, compute_capability=(7, 5))
    monkeypatch.setattr(device, "visible", lambda: (card,))
    lines = preset_table.lines([presets.find("16gb_qlora"), presets.find("16gb_qlora_t4")])
    assert lines[1].endswith("no bf16 here") and "no bf16" not in lines[2]


def test_without_its_gpus_a_preset_for_two_is_predicted_for_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    preset = presets.find("2x24gb_lora_zero3")
    model = str(preset.arguments["model_name_or_path"])
    folder = tmp_path / f"models--{model.replace('/', '--')}" / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(qwen3_shapes.config(model)))
    monkeypatch.setattr(device, "visible", lambda: ())
    peak, unit, *said = preset_table.lines([preset])[1].split()[-4:]
    assert (unit, said) == ("GiB", ["no", "GPU"])
    assert float(peak) < preset.usable_bytes / GIB
