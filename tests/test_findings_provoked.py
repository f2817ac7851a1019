"""Every finding, provoked through the whole preflight: by arguments, by this machine, or by one that was recorded."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import device as cards
from llamafactory_preflight import findings, preflight, report
from llamafactory_preflight.findings import host as host_findings
from llamafactory_preflight.findings import packages
from llamafactory_preflight.machine import host
from llamafactory_preflight.model import hub
from llamafactory_preflight.result import Result
from llamafactory_preflight.software import Software
from llamafactory_preflight.units import GIB, MIB
from test_device import Driver, install


FOLDER = Path(findings.__file__).parent
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
SPARSE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}  # fmt: skip
SOFTWARE = Software(
    llamafactory="0.9.5", torch="2.9.1", transformers="5.6.0", bitsandbytes="0.50.2", liger_kernel="0.8.5"
)
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
TRAINS = {"stage": "sft", "do_train": True, "bf16": True, "per_device_train_batch_size": 1, "cutoff_len": 512}
Patch = pytest.MonkeyPatch


class Place:
    """One machine, and the run that is looked at on it."""

    def __init__(self, folder: Path, patch: Patch) -> None:
        self.folder, self.patch = folder, patch
        self.config: dict[str, Any] = dict(DENSE)
        self.given: dict[str, Any] = {}
        self.devices = cards.planned(gpu="rtx4090")
        self.num_gpus = 1
        self.environ: dict[str, str] = {}
        self.origin = "a.yaml"
        self.here: host.MainMemory | None = None
        self.find: Callable[..., hub.ModelSource] = hub.find
        self.has(software=SOFTWARE)

    def has(self, *, software: Software) -> None:
        """What is installed."""
        self.patch.setattr(Software, "installed", classmethod(lambda cls: software))

    def look(self) -> Result:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        given = TRAINS | {"model_name_or_path": str(self.folder), "output_dir": str(self.folder / "out")} | self.given
        return preflight.examine(
            given,
            origin=self.origin,
            beside=None,
            devices=(self.devices,) * self.num_gpus if self.devices else (),
            host_budget_bytes=self.here.available_bytes if self.here else 512 * GIB,
            here=self.here,
            environ=self.environ,
            find=self.find,
        )


def driver(place: Place, *, capability: tuple[int, int] = (8, 6), free: int = 24 * GIB, **fake: Any) -> None:
    """The first card of a machine as NVML tells of it."""
    nvml = install(Driver(**fake), place.patch)
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: capability  # type: ignore[method-assign]
    nvml.free[0] = free
    nvml.running = {"compute": [(4711, 9 * GIB)]}
    (place.devices,) = cards.visible({"CUDA_VISIBLE_DEVICES": "0"})


def old_card(place: Place) -> None:
    driver(place, capability=(7, 5))
    place.given = {"flash_attn": "fa2"}


def old_card_that_fa2_fails_on(place: Place) -> None:
    old_card(place)
    place.given |= {"bf16": False, "fp16": True}
    place.has(software=dataclasses.replace(SOFTWARE, flash_attn="2.8.3"))


def other_process(place: Place) -> None:
    driver(place, free=14 * GIB)


def windows_card(place: Place) -> None:
    """WSL's kernel names its maker, and the run does not fit."""
    (place.folder / "osrelease").write_text("5.15.153.1-microsoft-standard-WSL2\n")
    place.patch.setattr(host, "is_wsl", partial(host.is_wsl, kernel=place.folder / "osrelease"))
    place.given = {"deepspeed": OFFLOADED, "finetuning_type": "full"}
    place.devices, place.num_gpus = cards.planned(gpu="8GiB"), 2


def recorded_group(place: Place, limit: int) -> None:
    """A container's memory group of version 2, file by file."""
    (place.folder / "meminfo").write_text("MemTotal: 268435456 kB\nMemAvailable: 201326592 kB\n")
    (place.folder / "cgroup").write_text("0::/\n")
    group = place.folder / "fs"
    group.mkdir()
    for name, text in {"memory.max": str(limit), "memory.current": "0", "memory.stat": ""}.items():
        (group / name).write_text(text + "\n")
    place.here = host.main_memory(meminfo=place.folder / "meminfo", process=place.folder, default_mount=group)


def small_container(place: Place) -> None:
    recorded_group(place, limit=1 * GIB)


def near_container(place: Place) -> None:
    recorded_group(place, limit=2 * GIB)


def locked(place: Place) -> None:
    """The limit is lowered for this process; the adapter is one of a machine that has InfiniBand."""
    (place.folder / "infiniband/mlx5_0").mkdir(parents=True)
    place.patch.setattr(
        host_findings, "locked_memory", partial(host_findings.locked_memory, infiniband=place.folder / "infiniband")
    )
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    place.environ["NNODES"] = "2"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(MIB, *(n for n in before if n >= 0)), before[1]))


def data_of(size: int) -> Callable[[Place], None]:
    """A local data set, and a disk that holds less than is written to it."""

    def provoke(place: Place) -> None:
        (place.folder / "rows.json").write_text("x" * size)
        (place.folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
        place.given = {"dataset": "rows", "dataset_dir": str(place.folder), "save_strategy": "no"}
        place.environ["HF_DATASETS_CACHE"] = str(place.folder)
        place.patch.setattr(host, "free_disk_bytes", lambda path: size)
        place.patch.setattr(host, "file_system", str)

    return provoke


def full_disk(place: Place) -> None:
    place.given = {"max_steps": 1000, "save_steps": 10}
    place.patch.setattr(host, "free_disk_bytes", lambda path: 4 * GIB)


def roomier_disk(place: Place) -> None:
    place.patch.setattr(host, "free_disk_bytes", lambda path: 300 * MIB)


def weights_to_download(place: Place) -> None:
    found = hub.ModelSource(config=DENSE, place="a hub", download_bytes=5 * GIB, cache_dir=place.folder / "hub")
    place.find = lambda *_, **__: found
    place.patch.setattr(host, "free_disk_bytes", lambda path: 4 * GIB)


def full_nvme(place: Place) -> None:
    deepspeed_missing(place)
    section = {"device": "nvme", "nvme_path": str(place.folder)}
    place.given = {
        "finetuning_type": "full", "save_strategy": "no",
        "deepspeed": {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_optimizer": section}},
    }  # fmt: skip
    place.patch.setattr(host, "free_disk_bytes", lambda path: 4 * GIB)


def unusable(place: Place) -> None:
    install(Driver(failure=Driver.NVML_ERROR_LIB_RM_VERSION_MISMATCH), place.patch)
    place.devices = None


def asks(origin: str = "a.yaml", num_gpus: int = 1, **given: Any) -> Callable[[Place], None]:
    """Only arguments."""

    def provoke(place: Place) -> None:
        place.given, place.origin, place.num_gpus = given, origin, num_gpus

    return provoke


def sparse(place: Place) -> None:
    place.config, place.given = dict(SPARSE), {"quantization_bit": 4}


def bare(place: Place) -> None:
    """Nothing that is asked for is installed."""
    place.has(software=Software(llamafactory="0.9.5", torch="2.9.1", transformers="5.6.0"))
    place.given = {"quantization_bit": 4, "enable_liger_kernel": True, "flash_attn": "fa2"}


def bad_pair(place: Place) -> None:
    place.has(software=dataclasses.replace(SOFTWARE, flash_attn="2.8.3"))
    place.given = {"flash_attn": "fa2"}


def deepspeed_missing(place: Place) -> None:
    place.given, place.num_gpus = {"deepspeed": {"zero_optimization": {"stage": 2}}}, 2


def deepspeed_too_new(place: Place) -> None:
    deepspeed_missing(place)
    place.has(software=dataclasses.replace(SOFTWARE, llamafactory="0.9.4", deepspeed="0.17.0"))


def could_share(place: Place) -> None:
    place.given, place.num_gpus = {"finetuning_type": "full"}, 2
    place.devices = cards.planned(gpu="8GiB")


def too_small_and_bare(place: Place) -> None:
    place.has(software=Software(llamafactory="0.9.5", torch="2.9.1", transformers="5.6.0"))
    place.devices = cards.planned(gpu="2GiB")


def nvme(place: Place) -> None:
    deepspeed_missing(place)
    place.given = {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}
    place.patch.setattr(packages, "find_library", lambda name: None)


def small_buffers(place: Place) -> None:
    nvme(place)
    place.given["deepspeed"]["zero_optimization"]["offload_param"] |= {"nvme_path": "/nvme", "buffer_size": 1e6}


def unlisted(place: Place) -> None:
    (place.folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    place.given = {"dataset": "row", "dataset_dir": str(place.folder)}


def without_rows(place: Place) -> None:
    unlisted(place)
    place.given["dataset"] = "rows"


def with_empty_folder(place: Place) -> None:
    without_rows(place)
    (place.folder / "rows.json").mkdir()


def resumes(place: Place) -> None:
    place.given = {"resume_from_checkpoint": str(place.folder / "nowhere")}


def goes_on_from(place: Place) -> None:
    place.given = {"adapter_name_or_path": str(place.folder / "nowhere")}


def no_rows(place: Place) -> None:
    without_rows(place)
    (place.folder / "rows.json").write_text("[]")


def below_a_file(place: Place) -> None:
    (place.folder / "file").write_text("")
    place.given = {"output_dir": str(place.folder / "file/out")}


def without_permission(place: Place) -> None:
    place.given = {"output_dir": str(place.folder)}
    place.patch.setattr(os, "access", lambda path, mode: False)


def without_list(place: Place) -> None:
    place.given = {"dataset": "rows", "dataset_dir": str(place.folder / "nowhere")}


def other_maker(place: Place) -> None:
    place.devices = cards.planned(gpu="mi300x")


def as_sold(place: Place) -> None:
    place.given = {"per_device_train_batch_size": 8, "cutoff_len": 2048}
    place.devices = cards.planned(gpu="24GB")


def shards_checkpointed(place: Place) -> None:
    place.given = {"deepspeed": {"zero_optimization": {"stage": 3}}, "use_reentrant_gc": False}
    place.has(software=dataclasses.replace(SOFTWARE, deepspeed="0.18.4"))


EVALUATES = {"val_size": 0.1, "eval_strategy": "steps"}
PROVOKED: Mapping[str, Callable[[Place], None]] = {
    "no-bf16": old_card,
    "no-fa2": old_card_that_fa2_fails_on,
    "fp16-where-bf16": asks(bf16=False, fp16=True),
    "flash-attn-missing": bare,
    "bitsandbytes-missing": bare,
    "liger-kernel-missing": bare,
    "deepspeed-missing": deepspeed_missing,
    "deepspeed-too-new": deepspeed_too_new,
    "deepspeed-would-share": could_share,
    "liger-kernel-would-help": too_small_and_bare,
    "bitsandbytes-would-help": too_small_and_bare,
    "deepspeed-needs-torchrun": asks(deepspeed={"zero_optimization": {"stage": 2}}),
    "transformers-5.6.0-fa2": bad_pair,
    "libaio-missing": nvme,
    "nvme-path": nvme,
    "nvme-buffer": small_buffers,
    "checkpointing-not-disabled": asks(gradient_checkpointing=True, disable_gradient_checkpointing=True),
    "checkpointing-of-shards": shards_checkpointed,
    "checkpointing-reentrant": asks(gradient_checkpointing=True, use_reentrant_gc=False),
    "json-not-read": asks("a.json"),
    "experts-not-quantized": sparse,
    "eval-accumulates": asks(compute_accuracy=True, **EVALUATES),
    "eval-batch": asks(**EVALUATES),
    "eager-attention": asks(flash_attn="disabled"),
    "fa3-refused": asks(flash_attn="fa3"),
    "low-rank-optimizer": asks(finetuning_type="full", use_galore=True, optim="adamw_torch_fused"),
    "template-unknown": asks(template="qwen33"),
    "data-set-unknown": unlisted,
    "data-list-missing": without_list,
    "data-file-missing": without_rows,
    "data-folder-empty": with_empty_folder,
    "data-rows": no_rows,
    "output-dir": below_a_file,
    "output-dir-permission": without_permission,
    "checkpoint-missing": resumes,
    "adapter-missing": goes_on_from,
    "no-samples": asks(dataset="rows", dataset_dir="ONLINE", max_samples=0),
    "quantization-bits": asks(quantization_bit=5),
    "dropout-range": asks(lora_dropout=7),
    "lora-target-unknown": asks(lora_target="q_prj"),
    "logger-unknown": asks(report_to="wandbb"),
    "preset-for-more-gpus": asks("2x24gb_lora.yaml"),
    "many-workers": asks(preprocessing_num_workers=4096),
    "gpu-in-use": other_process,
    "gpu-unusable": unusable,
    "device-not-measured": other_maker,
    "less-than-sold": as_sold,
    "windows-spill": windows_card,
    "wsl-pinned": windows_card,
    "host-memory": small_container,
    "host-limited": near_container,
    "memlock": locked,
    "disk-data": data_of(2000),
    "disk-checkpoints": full_disk,
    "disk-weights": weights_to_download,
    "disk-offloaded": full_nvme,
    "checkpoints-unlimited": roomier_disk,
}
PACKAGES = ("deepspeed", "bitsandbytes", "liger-kernel")
WITH_IMAGES = {"images", "vision-tower-kept"}  # tests/test_vision.py


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Place(tmp_path, monkeypatch)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


@pytest.mark.parametrize("name", PROVOKED)
def test_a_finding_comes_where_it_holds_and_only_there(name: str, place: Place) -> None:
    assert name not in {finding.id for finding in place.look().findings}
    PROVOKED[name](place)
    result = place.look()
    found = {finding.id: finding for finding in result.findings}
    assert name in found
    sentence = report.message(found[name])
    assert "{" not in sentence and sentence in " ".join(report.text(result).split())


def test_every_finding_is_provoked_somewhere() -> None:
    said: set[str] = set()
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant):
                said.add(str(node.value.value))
    assert said - WITH_IMAGES <= set(PROVOKED)
    composed = {"disk-data", "disk-checkpoints", "disk-weights", "disk-offloaded"}
    composed |= {*(f"{name}-missing" for name in PACKAGES)}
    assert set(PROVOKED) - said == composed
