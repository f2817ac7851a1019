from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from llamafactory_preflight import device
from llamafactory_preflight.device import Device, Process, Survey, choice, processes, torch_build
from llamafactory_preflight.device import driver as driver_state
from llamafactory_preflight.device.planned import sold_alike
from llamafactory_preflight.device.torch_build import TorchBuild
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB


class Driver(ModuleType):
    """Stands for NVML on a machine with three cards, of which the last is cut into slices; this one may have none."""

    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 12, 9, 18
    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        def __init__(self, value: int = 3) -> None:
            self.value = value
            super().__init__(f"error {value}")

    class NVMLError_NotSupported(NVMLError):
        pass

    CARDS = (("GPU-aaa", 24), ("GPU-aab", 16), ("GPU-bbb", 80))
    SLICES = MappingProxyType({"MIG-1234": (20, 7, 0), "MIG-5678": (10, 9, 1)})

    def __init__(self, *, failure: int | None = None, mig: bool = False, cuda: int = 12080) -> None:
        super().__init__("pynvml")
        self.failure, self.mig, self.cuda = failure, mig, cuda
        self.is_open = False
        self.running: dict[str, list[tuple[int, int | None]]] = {}
        self.free: dict[object, int] = {}

    def nvmlInit(self) -> None:
        if self.failure is not None:
            raise self.NVMLError(self.failure)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.CARDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int | str) -> bytes | str:
        return handle if isinstance(handle, str) else self.CARDS[handle][0].encode()

    def nvmlDeviceGetName(self, handle: int | str) -> str:
        return f"slice {handle}" if isinstance(handle, str) else f"card {handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle == 0:
            raise self.NVMLError
        return (int(self.mig and handle == 2),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:
        if index not in (1, 4):
            raise self.NVMLError
        return list(self.SLICES)[(1, 4).index(index)]

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return self.SLICES[handle][1]

    def nvmlDeviceGetComputeInstanceId(self, handle: str) -> int:
        return self.SLICES[handle][2]

    def nvmlDeviceGetMemoryInfo(self, handle: int | str, version: int | None = None) -> Any:
        total = (self.SLICES[handle][0] if isinstance(handle, str) else self.CARDS[handle][1]) * GIB
        return SimpleNamespace(total=total, free=self.free.get(handle, total - GIB), reserved=GIB // 4)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, 6)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.running.get("compute", [])]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: object) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.running.get("graphics", [])]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: object) -> list[Any]:
        raise self.NVMLError


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(Driver(), monkeypatch)


def install(fake: Driver, monkeypatch: pytest.MonkeyPatch, *, build: TorchBuild | None = None) -> Driver:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch_build, "installed", lambda: build or TorchBuild(cuda="12.8"))
    return fake


ALL = ["card 0", "card 1", "card 2"]
CHOICES = [
    (None, ALL),
    ("2,0", ["card 2", "card 0"]),
    (" 1 ", ["card 1"]),
    ("", []),
    ("-1", []),
    ("-0", ["card 0"]),
    ("0,-1,1", ["card 0"]),
    ("0,7,1", ["card 0"]),
    ("7", []),
    ("0,0", []),
    ("1,2,1", []),
    ("1gpu,2", ["card 1", "card 2"]),
    ("gpu0", []),
    (",0", []),
    ("0,", ["card 0"]),
    ("99999999999999999999", []),
    ("GPU-b", ["card 2"]),
    ("GPU-aab", ["card 1"]),
    ("GPU-bbb,GPU-aab", ["card 2", "card 1"]),
    ("GPU-bbb,GPU-bbb", []),
    ("GPU-bbb,0", ["card 2"]),
    ("GPU-aa", []),
    ("GPU-xyz", []),
    ("NoDevFiles", []),
    ("MIG-1234", []),
]


@pytest.mark.parametrize(("chosen", "names"), CHOICES)
def test_visible_devices(driver: Driver, chosen: str | None, names: list[str]) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    seen = device.visible(environ)
    assert [gpu.name for gpu in seen] == names
    assert [gpu.index for gpu in seen] == list(range(len(names)))
    assert [f"card {gpu.physical_index}" for gpu in seen] == names
    assert not driver.is_open


@pytest.mark.parametrize("chosen", [text for text, _ in CHOICES if text and not text.startswith("MIG")])
def test_torch_reads_the_variable_in_the_same_way(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _parse_visible_devices, _transform_uuid_to_ordinals

    uuids = [uuid for uuid, _ in Driver.CARDS]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    parsed: list[Any] = list(_parse_visible_devices())
    if parsed and isinstance(parsed[0], str):
        parsed = _transform_uuid_to_ordinals(parsed, uuids)
    beyond = next((place for place, number in enumerate(parsed) if number >= len(uuids)), len(parsed))
    assert choice.chosen(chosen, count=len(uuids), uuids=uuids) == parsed[:beyond]


def test_what_is_told_of_a_card(driver: Driver) -> None:
    (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "1"})
    assert gpu == Device(
        name="card 1",
        total_bytes=16 * GIB,
        free_bytes=15 * GIB,
        compute_capability=(8, 6),
        physical_index=1,
        uuid="GPU-aab",
        reserved_bytes=GIB // 4,
    )
    assert gpu.taken_bytes == GIB - GIB // 4


def test_a_slice_has_its_own_size_and_its_cards_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Driver(mig=True), monkeypatch)
    (part,) = device.visible({"CUDA_VISIBLE_DEVICES": "MIG-5"})
    assert (part.name, part.total_bytes, part.free_bytes) == ("slice MIG-5678", 10 * GIB, 9 * GIB)
    assert (part.physical_index, part.uuid, part.compute_capability) == (2, "MIG-5678", (8, 6))
    assert part.context_bytes < GIB // 2, "a slice has few multiprocessors"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["card 0", "card 1", "slice MIG-1234"]),
        ("2", ["slice MIG-1234"]),
        ("MIG-1234,MIG-5678", ["slice MIG-1234"]),  # a process sees one slice
        ("MIG-GPU-bbb/9/1", ["slice MIG-5678"]),
        ("MIG-GPU-bbb/9/9", []),
        ("MIG-", []),
        ("MIG-9", []),
    ],
)
def test_slices_that_are_visible(monkeypatch: pytest.MonkeyPatch, chosen: str | None, names: list[str]) -> None:
    install(Driver(mig=True), monkeypatch)
    seen = device.visible({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen})
    assert [part.name for part in seen] == names


@pytest.mark.parametrize("failure", [Driver.NVML_ERROR_LIBRARY_NOT_FOUND, Driver.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, failure: int) -> None:
    install(Driver(failure=failure), monkeypatch)
    assert device.survey({}) == Survey()


def test_no_nvml_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device.survey({}) == Survey()


@pytest.mark.parametrize("chosen", ["7", "0,0", "GPU-xyz", "NoDevFiles", "x" * 500])
def test_a_choice_that_hides_every_card_is_told(driver: Driver, chosen: str) -> None:
    found = device.survey({"CUDA_VISIBLE_DEVICES": chosen})
    assert found.devices == () and found.fault is not None
    assert f"CUDA_VISIBLE_DEVICES={chosen[:40]} leaves none of the 3 GPUs" in found.fault and len(found.fault) < 200


@pytest.mark.parametrize("chosen", ["", "-1", " -1 "])
def test_a_choice_that_hides_every_card_on_purpose_is_not_told(driver: Driver, chosen: str) -> None:
    assert device.survey({"CUDA_VISIBLE_DEVICES": chosen}) == Survey()


def test_a_container_without_the_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(Driver(failure=Driver.NVML_ERROR_LIBRARY_NOT_FOUND), monkeypatch)
    (tmp_path / "nvidiactl").write_text("")
    monkeypatch.setattr(driver_state, "CONTROL", tmp_path / "nvidiactl")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in (device.survey({}).fault or "")


def test_an_old_package_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, "nvmlDeviceGetUUID")
    assert "pip install -U nvidia-ml-py" in (device.survey({}).fault or "")
    assert not driver.is_open


@pytest.mark.parametrize(("failure", "words"), [(18, "reboot"), (999, "does not answer (error 999)")])
def test_a_driver_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch, failure: int, words: str) -> None:
    install(Driver(failure=failure), monkeypatch)
    found = device.survey({})
    assert found.devices == () and found.fault is not None and words in found.fault


@pytest.mark.parametrize(
    ("build", "cuda", "words"),
    [
        (TorchBuild(), 12080, "built without CUDA"),
        (TorchBuild(cuda="13.0"), 12080, "runs CUDA up to 12"),
        (TorchBuild(cuda="12.8"), 12020, None),
        (TorchBuild(cuda="12.8"), 13000, None),
    ],
)
def test_a_card_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, build: TorchBuild, cuda: int, words: str | None
) -> None:
    install(Driver(cuda=cuda), monkeypatch, build=build)
    found = device.survey({})
    assert (found.fault is None) == (words is None) and len(found.devices) == (0 if words else 3)
    assert words is None or words in (found.fault or "")


def test_what_the_installed_torch_is_built_for() -> None:
    import torch

    assert torch_build.installed() == TorchBuild(cuda=torch.version.cuda, hip=torch.version.hip)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n", TorchBuild(hip="6.4.43482")),
        ("cuda = '11.8'\n", TorchBuild(cuda="11.8")),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", TorchBuild()),
        ("something else", None),
    ],
)
def test_other_builds(tmp_path: Path, text: str, build: TorchBuild | None) -> None:
    (tmp_path / "version.py").write_text(text)
    assert torch_build.read(tmp_path / "version.py") == build


def test_who_holds_a_card(driver: Driver) -> None:
    driver.running = {"compute": [(4_000_001, 5 * GIB), (4_000_002, None)], "graphics": [(4_000_001, 5 * GIB)]}
    driver.free = {0: 16 * GIB}
    (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "0"})
    assert gpu.processes == (Process(pid=4_000_001, used_bytes=5 * GIB), Process(pid=4_000_002))
    assert gpu.taken_bytes == 8 * GIB - GIB // 4
    assert gpu.hidden_bytes == 3 * GIB - GIB // 4


def test_what_this_run_holds_itself_counts_as_free(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        driver.running = {"compute": [(os.getpid(), GIB), (child.pid, 2 * GIB)]}
        driver.free = {0: 20 * GIB}
        (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "0"})
        assert gpu.free_bytes == 21 * GIB
        assert [process.pid for process in gpu.processes] == [child.pid]
        # Under torchrun the ranks have one parent; here this process's own children stand for them.
        monkeypatch.setattr(os, "getppid", lambda: os.getpid())
        (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "1"})
        assert gpu.free_bytes == 23 * GIB and gpu.processes == ()
    finally:
        child.kill()
        child.wait()


def test_an_own_context_that_the_driver_does_not_list_counts_as_free(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    driver.free = {0: 23 * GIB, 1: 12 * GIB}
    first, second, _ = device.visible({})
    assert (first.free_bytes, second.free_bytes) == (23 * GIB, 12 * GIB + second.context_bytes)
    driver.free = {0: 12 * GIB, 1: 12 * GIB}
    assert {card.free_bytes for card in device.visible({"LOCAL_RANK": "1"})[:2]} == {12 * GIB + second.context_bytes}


def test_a_card_that_shares_main_memory_has_no_known_size(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Driver, handle: object, version: int | None = None) -> Any:
        raise self.NVMLError_NotSupported

    monkeypatch.setattr(Driver, "nvmlDeviceGetMemoryInfo", refuse)
    first, *_ = device.visible({})
    assert (first.name, first.total_bytes, first.free_bytes, first.taken_bytes) == ("card 0", None, None, 0)


def test_a_process_has_the_name_of_its_program_without_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "serve_model.py"
    script.write_text("print('started', flush=True); input()")
    child = subprocess.Popen(
        [sys.executable, "-u", str(script), "--token", "secret"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"started\n"
        (tmp_path / "self/ns").mkdir(parents=True)
        (tmp_path / "self/ns/pid").symlink_to(processes.FIRST_NAMESPACE)
        (tmp_path / str(child.pid)).symlink_to(f"/proc/{child.pid}")
        name = processes.name_of(child.pid, proc=tmp_path)
        assert name is not None and name.startswith("python") and name.endswith(" serve_model.py")
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("command", "comm", "name"),
    [
        (b"/usr/bin/vllm\0serve\0x", b"vllm", "vllm"),
        (b"python\0-c\0import os; os.fork()\0", b"python", "python"),
        (b"p" * 10_000, b"p", "p" * 37 + "..."),
        (b"", b"Xorg\n", "Xorg"),
        (b"\x1b[31mred\0", b"x", "?[31mred"),
        (b"\xff\xfe\0", b"x", "\ufffd\ufffd"),
    ],
)
def test_odd_names(tmp_path: Path, command: bytes, comm: bytes, name: str) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(processes.FIRST_NAMESPACE)
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cmdline").write_bytes(command)
    (tmp_path / "7/comm").write_bytes(comm)
    assert processes.name_of(7, proc=tmp_path) == name


def test_in_a_container_a_name_needs_an_open_card(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "7/cmdline").write_bytes(b"somebody\0")
    assert processes.name_of(7, proc=tmp_path) is None
    (tmp_path / "7/fd/3").symlink_to("/dev/nvidia0")
    assert processes.name_of(7, proc=tmp_path) == "somebody"


def test_without_proc_nobody_has_a_name(tmp_path: Path) -> None:
    assert processes.name_of(7, proc=tmp_path) is None
    assert not processes.is_ours(7, {"LOCAL_RANK": "0"}, proc=tmp_path)


def test_the_smallest_decides(driver: Driver) -> None:
    seen = device.visible({})
    assert device.smallest(seen).name == "card 1"
    unknown = Device(name="unknown", total_bytes=None, free_bytes=None)
    assert device.smallest([*seen, unknown]) is unknown
    assert unknown.context_bytes > 0 and unknown.taken_bytes == 0


@pytest.mark.parametrize("gpu", ["rtx4090", "RTX 4090", "rtx_4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_by_name(gpu: str) -> None:
    card = device.planned(gpu=gpu)
    assert card is not None
    assert card.free_bytes == card.total_bytes == int(23.5 * GIB)


@pytest.mark.parametrize(
    ("gpu", "kind", "capability"),
    [
        ("Tesla T4", "cuda", (7, 5)),
        ("h200", "cuda", (9, 0)),
        ("AMD Instinct MI300X", "rocm", None),
        ("Ascend 910B", "npu", None),
        ("24GiB", "cuda", None),
    ],
)
def test_a_name_says_the_kind_and_the_generation(gpu: str, kind: str, capability: tuple[int, int] | None) -> None:
    card = device.planned(gpu=gpu)
    assert card is not None and (card.kind, card.compute_capability, card.planned) == (kind, capability, True)
    part = device.planned(gpu=gpu, free="10GiB")
    assert part is not None and (part.kind, part.compute_capability) == (kind, capability)


def test_a_card_by_size() -> None:
    card = device.planned(gpu="24GB")
    assert card is not None and card.planned
    assert card.free_bytes == 24 * GIB


@pytest.mark.parametrize("gpu", [None, "rtx4090"])
def test_free_leaves_the_context_out(gpu: str | None) -> None:
    card = device.planned(gpu=gpu, free="21.5GiB")
    assert card is not None and card.free_bytes is not None
    assert card.free_bytes - card.context_bytes == int(21.5 * GIB)


def test_free_is_part_of_the_total() -> None:
    with pytest.raises(UserError, match="more than --gpu 24GiB has"):
        device.planned(gpu="24GiB", free="30GiB")


def test_nothing_planned() -> None:
    assert device.planned(gpu=None) is None


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("24", "has no unit"),
        ("4090", "has no unit.* Write 4090GiB, or rtx4090 for the card"),
        ("0", "is no memory at all"),
        ("-3GiB", "not an amount"),
        ("0GiB", "no memory"),
        ("rtx9999", "not a card"),
        ("", "not a"),
    ],
)
def test_what_is_no_card(gpu: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        device.planned(gpu=gpu)


def test_the_context_of_a_large_card_is_what_was_measured() -> None:
    h200 = device.planned(gpu="h200")
    small = device.planned(gpu="rtx3060")
    assert h200 is not None and small is not None
    assert h200.context_bytes == pytest.approx(0.67 * GIB, rel=0.01)
    assert small.context_bytes < h200.context_bytes


def test_a_size_that_cards_are_sold_with_stands_for_those_which_have_less() -> None:
    def alike(gpu: str, free: str | None = None) -> dict[str, float]:
        card = device.planned(gpu=gpu, free=free)
        assert card is not None
        return {name: round(size / GIB, 1) for name, size in sold_alike(card).items()}

    assert alike("48GiB") == alike("48 GB") == {"l40s": 44.4}
    assert alike("24GB") == {"a10": 22.1, "l4": 22.1, "rtx3090": 23.6, "rtx4090": 23.5}
    assert alike("rtx4090") == alike("23GiB") == alike("24GiB", free="22GiB") == {}
    assert all(0.9 < card.gib / card.sold_gb < 1 for card in device.CARDS.values())
