"""The second look, in real trainings: once the data is tokenized, before the weights, the longest sample decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from llamafactory_preflight.data import lengths
from llamafactory_preflight.data.lengths import Longest


ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "presets/cpu_smoke.yaml"
SECOND = "the longest of"
WEIGHTS = "Loading weights"


def write_data(folder: Path, words: list[int], also: dict[str, Any] | None = None) -> Path:
    """A data set whose answers have these numbers of words."""
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": " one" * n} for n in words]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}} | (also or {})))
    return folder


@pytest.fixture
def train(run: Any, tmp_path: Path, tiny_model: Path) -> Any:
    """Starts a real training for a card that is only planned for, with a cutoff that could not fit it."""

    def start(
        words: list[int], *, card: str, mode: str = "block", also: dict[str, Any] | None = None, **changes: Any
    ) -> Any:
        given = {
            "model_name_or_path": tiny_model, "dataset": "rows", "dataset_dir": write_data(tmp_path, words, also),
            "cutoff_len": 16384, "per_device_train_batch_size": 4, "max_steps": 1, "output_dir": tmp_path / "out",
            "plot_loss": "false", "packing": "false",
        } | changes  # fmt: skip
        command = ["llamafactory-cli", "train", PRESET, *(f"{key}={value}" for key, value in given.items())]
        env = {"LLAMAFACTORY_PREFLIGHT_GPU": card, "LLAMAFACTORY_PREFLIGHT": mode, "CUDA_VISIBLE_DEVICES": ""}
        done = run(command, cwd=tmp_path, env=env)
        done.stderr = " ".join(done.stderr.split())  # sentences are wrapped
        return done

    return start


EVALUATED = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def test_short_data_with_a_long_cutoff_is_not_refused(train: Any, tmp_path: Path) -> None:
    done = train([8] * 16, card="2GiB", **EVALUATED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WILL NOT FIT" in done.stderr and "the data decides" in done.stderr
    assert f"{SECOND} 12 samples is number 0 with" in done.stderr
    assert "A batch of 4 as long needs" in done.stderr and "eval_loss" in done.stdout + done.stderr
    assert done.stderr.index(SECOND) < done.stderr.index(WEIGHTS)
    assert (tmp_path / "out/adapter_model.safetensors").exists()


def test_one_sample_too_long_is_named_before_the_weights_load(train: Any, tmp_path: Path) -> None:
    done = train([5, 8, 900, 11], card="2GiB", per_device_train_batch_size=8)
    assert done.returncode == 1
    assert f"{SECOND} 4 samples is number 2 with 9" in done.stderr
    assert "A batch of 4 as long needs" in done.stderr  # there are no more
    assert "Stopped before loading the weights" in done.stderr
    assert WEIGHTS not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out/adapter_model.safetensors").exists()


def test_one_sample_too_long_to_evaluate_is_told_before_the_weights_load(train: Any, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    write_data(tmp_path / "long", [900])
    evaluated = EVALUATED | {"val_size": 0, "eval_dataset": "long"}
    done = train([8] * 4, card="2GiB", also={"long": {"file_name": "long/rows.json"}}, **evaluated)
    assert done.returncode == 1
    assert f"{SECOND} 4 samples is number 0 with" in done.stderr
    assert "An evaluation of 4 with 9" in done.stderr and "Stopped before loading the weights" in done.stderr
    assert WEIGHTS not in done.stderr + done.stdout


def test_in_warn_mode_it_only_says_so(train: Any) -> None:
    done = train([5, 8, 700, 11], card="2GiB", mode="warn")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{SECOND} 4 samples is number 2" in done.stderr
    assert "Stopped" not in done.stderr


def test_the_longer_half_of_a_pair_counts_and_selection_is_followed() -> None:
    pairs = Dataset.from_dict(
        {"chosen_input_ids": [[1] * n for n in (3, 9, 2)], "rejected_input_ids": [[1] * n for n in (4, 1, 30)]}
    )
    assert lengths.longest({"train_dataset": pairs}) == Longest(tokens=30, index=2, num_samples=3)
    assert lengths.longest({"train_dataset": pairs.select([1, 0])}) == Longest(tokens=9, index=0, num_samples=2)


def test_what_is_evaluated_has_a_length_of_its_own() -> None:
    short, long = (Dataset.from_dict({"input_ids": [[1] * n]}) for n in (4, 7))
    module: dict[str, Any] = {"train_dataset": short}
    assert lengths.longest(module) == Longest(tokens=4, index=0, num_samples=1)
    assert lengths.longest(module | {"eval_dataset": long}) == Longest(tokens=4, index=0, num_samples=1, eval_tokens=7)
    several = lengths.longest(module | {"eval_dataset": {"a": long, "b": short}})
    assert several is not None and several.eval_tokens == 7
    odd = lengths.longest(module | {"eval_dataset": {"a": long, "b": Dataset.from_dict({"other": [1]})}})
    assert odd is not None and odd.eval_tokens is None


def test_what_cannot_be_told_beforehand_is_not_guessed() -> None:
    streamed = IterableDataset.from_generator(lambda: iter([{"input_ids": [1]}]))
    assert lengths.longest({"train_dataset": streamed}) is None
    assert lengths.longest({"eval_dataset": Dataset.from_dict({"input_ids": [[1]]})}) is None
    assert lengths.longest({"train_dataset": Dataset.from_dict({"other": [1]})}) is None
