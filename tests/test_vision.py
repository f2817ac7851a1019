"""Images: how many there are, what the vision tower does with them, and what nobody predicts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from llamafactory_preflight import memory, preflight, simulate
from llamafactory_preflight.data import lengths, media, rows
from llamafactory_preflight.data.images import Counted, Images, Source
from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.fitting import judgement
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import measure_images  # noqa: E402
import measure_runs  # noqa: E402


SOFTWARE = Software.installed()
CARD = memory.Card(compute_capability=(9, 0))
TOKENS = {"image_token_id": 1001, "video_token_id": 1002, "vision_start_token_id": 1003, "vision_end_token_id": 1004}
TEXT: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN3: dict[str, Any] = TOKENS | {
    "model_type": "qwen3_vl", "dtype": "bfloat16", "tie_word_embeddings": True,
    "text_config": TEXT | {"model_type": "qwen3_vl_text", "dtype": "bfloat16",
                           "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
    "vision_config": {"model_type": "qwen3_vl", "depth": 5, "hidden_size": 512, "intermediate_size": 2048,
                      "num_heads": 8, "out_hidden_size": 512, "num_position_embeddings": 256,
                      "deepstack_visual_indexes": [1, 2, 3]},
}  # fmt: skip
OLDER = TOKENS | TEXT | {"dtype": "bfloat16", "tie_word_embeddings": True, "num_hidden_layers": 3}
OLDER |= {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
QWEN25 = OLDER | {
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 5, "hidden_size": 512, "intermediate_size": 1365, "num_heads": 8,
                      "out_hidden_size": 512, "fullatt_block_indexes": [2, 4]},
}  # fmt: skip
QWEN2 = OLDER | {
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 5, "embed_dim": 512, "mlp_ratio": 4, "num_heads": 8, "hidden_size": 512},
}
CONFIGS: Mapping[str, dict[str, Any]] = {"qwen3_vl": QWEN3, "qwen2_5_vl": QWEN25, "qwen2_vl": QWEN2}
RUN = RunDescription(
    model_name_or_path="model", do_train=True, bf16=True, cutoff_len=1024, per_device_train_batch_size=1,
    gradient_accumulation_steps=2, template="qwen3_vl", optim="adamw_torch_fused",
)  # fmt: skip


def images(*patches: int) -> Images:
    return Images(patches=patches, exact=True, reason="given")


def estimate(run: RunDescription, pictures: Images | None, model: str = "qwen3_vl") -> memory.MemoryEstimate:
    shape = ModelShape.from_config(CONFIGS[model])
    return memory.estimate(run, shape, software=SOFTWARE, card=CARD, images=pictures)


@pytest.mark.parametrize(
    ("model", "changes", "patches"),
    [
        pytest.param("qwen3_vl", {"per_device_train_batch_size": 2}, (1024, 576), id="two images, batch of two"),
        pytest.param(
            "qwen3_vl",
            {"finetuning_type": "full", "bf16": False, "pure_bf16": True, "flash_attn": "disabled"},
            (2304,),
            id="full, eager attention",
        ),
        pytest.param("qwen2_5_vl", {}, (1600,), id="a tower that keeps everything"),
        pytest.param("qwen2_vl", {"quantization_bit": 4}, (1600,), id="a quantized tower, which keeps nothing"),
    ],
)
def test_formula_and_simulation_agree(model: str, changes: dict[str, Any], patches: tuple[int, ...]) -> None:
    run = replace(RUN, **changes)
    found, simulated = (
        estimate(run, images(*patches), model),
        simulate.estimate(run, CONFIGS[model], software=SOFTWARE, card=CARD, images=images(*patches)),
    )
    assert found.peak_allocated_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=0.01)


def test_a_frozen_tower_keeps_its_activations_only_under_adapters_with_checkpointing() -> None:
    def kept(model: str, **changes: Any) -> bool:
        found = estimate(replace(RUN, **changes), images(1600), model)
        return any("frozen vision tower" in reason for reason in found.reasons)

    assert kept("qwen2_5_vl") and kept("qwen2_vl", finetuning_type="oft")
    assert not kept("qwen3_vl")
    assert not kept("qwen2_5_vl", disable_gradient_checkpointing=True)
    assert not kept("qwen2_5_vl", quantization_bit=4)
    assert not kept("qwen2_5_vl", finetuning_type="full")


def test_more_and_larger_images_take_more() -> None:
    peaks = [estimate(RUN, given).peak_allocated_bytes for given in (images(256), images(2304), images(2304, 1024))]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"freeze_vision_tower": False}, "Training the vision tower"),
        ({"freeze_multi_modal_projector": False}, "Training the vision tower or the projector"),
        ({"stage": "dpo"}, "Images in stage `dpo`"),
        ({"packing": True}, "Packed samples with images"),
        ({"gradient_checkpointing": True, "disable_gradient_checkpointing": True}, "Trainer's own"),
    ],
)
def test_what_has_no_formula_is_said(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unmodelled, match=reason):
        estimate(replace(RUN, **changes), images(256))


SOURCE = Source(tower=ModelShape.from_config(QWEN3).vision.tower, count=2)  # type: ignore[union-attr, arg-type]


def test_images_are_as_large_as_their_limit_or_the_cutoff_allows() -> None:
    limited, cut = (SOURCE.of(replace(RUN, cutoff_len=length)) for length in (2048, 600))
    assert limited.patches == (48 * 48, 48 * 48)
    assert "image_max_pixels: 589824" in limited.reason and "2 in a sample" in limited.reason
    assert cut.patches == (298 * 4, 298 * 4)
    smaller = SOURCE.of(replace(RUN, cutoff_len=2048, image_max_pixels=256 * 256))
    assert smaller.patches == (256, 256)


def test_where_nothing_is_known_of_their_number_as_many_as_fit_are_counted() -> None:
    found = replace(SOURCE, count=None).of(replace(RUN, cutoff_len=2048))
    assert found.patches == (2304,) * 3
    assert "as many as fit" in found.reason


def test_counted_tokens_are_shared_out() -> None:
    found = replace(SOURCE, counted=Counted(images=3, tokens=100)).of(RUN)
    assert found.exact
    assert found.patches == (34 * 4, 33 * 4, 33 * 4)


def test_the_bounds_of_a_guess_reach_down_to_small_images() -> None:
    guess = SOURCE.of(replace(RUN, cutoff_len=2048))
    run = replace(RUN, cutoff_len=2048, gradient_accumulation_steps=8)
    guessed, certain = estimate(run, guess), estimate(run, replace(guess, exact=True))
    assert guessed.peak_allocated_bytes == certain.peak_allocated_bytes
    assert guessed.low_bytes < certain.low_bytes
    assert guessed.high_bytes == certain.high_bytes


INFO = {
    "photos": {"file_name": "photos.json", "columns": {"images": "images"}},
    "lines": {"file_name": "lines.jsonl", "columns": {"images": "pictures"}},
    "words": {"file_name": "photos.json", "columns": {"prompt": "q"}},
    "films": {"file_name": "photos.json", "columns": {"images": "images", "videos": "videos"}},
    "remote": {"hf_hub_url": "someone/data", "columns": {"images": "images"}},
    "broken": {"file_name": "broken.json", "columns": {"images": "images"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    (tmp_path / "photos.json").write_text(json.dumps([{"images": ["a.png"]}, {"images": ["b.png", "c.png"]}, {}]))
    (tmp_path / "lines.jsonl").write_text('{"pictures": "a.png"}\n\n{"pictures": null}\n')
    (tmp_path / "broken.json").write_text("[{")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "count"), [("photos", 2), ("lines", 1), ("words, photos", 2), ("remote", None), ("photos,broken", None)]
)
def test_images_are_counted_in_local_files(folder: Path, names: str, count: int | None) -> None:
    found = media.of({"dataset": names, "dataset_dir": str(folder)})
    assert found is not None
    assert found.num_images == count
    assert not found.others


def test_a_file_too_large_to_read_at_once_is_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST", 10)
    found = media.of({"dataset": "photos", "dataset_dir": str(folder)})
    assert found is not None and found.num_images is None


def test_text_is_no_media(folder: Path) -> None:
    assert media.of({"dataset": "words", "dataset_dir": str(folder)}) is None
    assert media.of({"dataset": ["photos"], "dataset_dir": "ONLINE"}) is None


def check(folder: Path, names: str, config: dict[str, Any] = QWEN3, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    given = {
        "model_name_or_path": str(folder), "dataset_dir": str(folder), "dataset": names, "stage": "sft", "bf16": True,
        "do_train": True, "template": "qwen3_vl_nothink", "finetuning_type": "lora", "output_dir": str(folder / "out"),
    }  # fmt: skip
    return preflight.check(given | changes, free="20GiB")


def test_a_data_set_with_images_is_predicted_and_the_report_says_how(folder: Path) -> None:
    text, pictures = check(folder, "words"), check(folder, "photos")
    assert text.verdict.word == pictures.verdict.word == "fits"
    assert any("2 in a sample" in finding.message for finding in pictures.findings)
    assert not any("image_max_pixels" in reason for reason in text.estimate.reasons)


def test_changes_of_a_run_are_predicted_with_its_images(folder: Path) -> None:
    text, pictures = check(folder, "words"), check(folder, "photos")
    assert judgement.predictor(pictures)(pictures.run) == pictures.estimate
    assert judgement.predictor(text)(text.run) == text.estimate
    shorter = replace(pictures.run, cutoff_len=64)
    reasons = judgement.predictor(pictures)(shorter).reasons
    assert any("fits into 64 tokens" in reason for reason in reasons)


def test_a_tower_that_keeps_its_activations_is_pointed_out(folder: Path) -> None:
    kept, released = (
        [finding.id for finding in check(folder, "photos", config).findings] for config in (QWEN25, QWEN3)
    )
    assert "vision-tower-kept" in kept
    assert "vision-tower-kept" not in released


def test_videos_and_other_towers_are_unknown(folder: Path) -> None:
    assert "videos or the sound of films" in check(folder, "films").verdict.reasons[0]
    gemma = TEXT | {"model_type": "gemma3", "text_config": TEXT, "vision_config": {}}
    assert "images of photos" in check(folder, "photos", gemma).verdict.reasons[0]
    assert "Training the vision tower" in check(folder, "photos", freeze_vision_tower=False).verdict.reasons[0]


def test_images_in_tokenized_data_are_counted() -> None:
    data = {"input_ids": [[1, 7, 7, 2], [7, 1], [1, 1, 1]], "images": [["a"], ["b", "c"], []]}
    assert lengths.images({"train_dataset": Dataset.from_dict(data)}, 7) == Counted(images=2, tokens=2)
    assert lengths.images({"train_dataset": Dataset.from_dict(data).select([2])}, 7) is None
    assert lengths.images({"train_dataset": Dataset.from_dict({"input_ids": [[7]]})}, 7) is None
    assert lengths.images({"train_dataset": Dataset.from_dict({"input_ids": [[7]], "images": [None]})}, 7) is None


def test_patches_of_measured_images_are_those_of_the_processor() -> None:
    from transformers import Qwen2VLImageProcessor

    for model_type, (_, family) in measure_images.PROCESSORS.items():
        processor = Qwen2VLImageProcessor(**measure_images.SIZES[family])
        for width, height in ((768, 768), (640, 480), (500, 300), (40, 30), (700, 100)):
            expected = processor.get_number_of_image_patches(height, width, {})
            assert measure_images.patches({"model_type": model_type}, width, height) == expected


TRAIN = """
import sys
import llamafactory.model.loader as loader
loader.is_torch_version_greater_than = lambda version: False  # torch 2.9 is slow at Conv3d and refused for it
from llamafactory.train.tuner import run_exp
import json
run_exp(json.loads(sys.argv[1]))
"""


def test_a_real_training_on_images_is_looked_at_twice(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_runs, "ROOT", tmp_path)
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    text = QWEN3["text_config"] | small | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    vision = QWEN3["vision_config"] | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
    }
    measure_runs.write_model("tiny", QWEN3 | {"text_config": text, "vision_config": vision})
    case = {
        "id": "images", "model": "tiny", "images": [[64, 64], [64, 64]],
        "args": {"template": "qwen3_vl_nothink", "cutoff_len": 512, "max_steps": 1, "bf16": False,
                 "gradient_accumulation_steps": 1},
    }  # fmt: skip
    given = measure_runs.arguments(case)
    env = measure_runs.ENVIRONMENT | {"LLAMAFACTORY_PREFLIGHT": "block", "LLAMAFACTORY_PREFLIGHT_GPU": "24GiB"}
    done = run([sys.executable, "-c", TRAIN, json.dumps(given)], cwd=tmp_path, env=env | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stderr.split())
    assert "Images are taken to be as large as fits into 512 tokens (254 tokens each), and 2 in a sample" in said
    assert "the longest of 64 samples is number 0 with 512 tokens" in said
    assert "A sample has up to 2 images, which are up to 128 tokens." in said
    assert "is left out" not in said
    assert (tmp_path / "out/images/adapter_model.safetensors").exists()
