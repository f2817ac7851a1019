from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llamafactory_preflight import device
from llamafactory_preflight.device import Device
from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB


class Driver(ModuleType):
    """Stands for NVML on a machine with three cards; this machine may have none."""

    class NVMLError(Exception):
        pass

    CARDS = (("GPU-aaa", 24), ("GPU-aab", 16), ("GPU-bbb", 80))

    def __init__(self, *, works: bool = True) -> None:
        super().__init__("pynvml")
        self.works = works
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("driver not loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.CARDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.CARDS[handle][0].encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total = self.CARDS[handle][1] * GIB
        return SimpleNamespace(total=total, free=total - GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, 6)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        raise self.NVMLError("not supported")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["card 0", "card 1", "card 2"]),
        ("2,0", ["card 2", "card 0"]),
        (" 1 ", ["card 1"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["card 0"]),
        ("0,7,1", ["card 0"]),
        ("GPU-b", ["card 2"]),
        ("GPU-aab", ["card 1"]),
        ("GPU-aa", []),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_visible_devices(driver: Driver, chosen: str | None, names: list[str]) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    seen = device.visible(environ)
    assert [gpu.name for gpu in seen] == names
    assert [gpu.index for gpu in seen] == list(range(len(names)))
    assert not driver.is_open


def test_what_is_told_of_a_card(driver: Driver) -> None:
    (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "1"})
    assert gpu == Device(
        name="card 1", total_bytes=16 * GIB, free_bytes=15 * GIB, compute_capability=(8, 6), processes=()
    )


def test_a_slice_has_no_known_size(driver: Driver) -> None:
    (gpu,) = device.visible({"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert gpu.total_bytes is None and gpu.free_bytes is None
    assert gpu.context_bytes > 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(works=False))
    assert device.visible({}) == ()


def test_no_nvml_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device.visible({}) == ()


def test_the_smallest_decides(driver: Driver) -> None:
    assert device.smallest(device.visible({})).name == "card 1"
    assert device.smallest(device.visible({"CUDA_VISIBLE_DEVICES": "1,MIG-1"})).name == "MIG-1"


@pytest.mark.parametrize("gpu", ["rtx4090", "RTX 4090", "rtx_4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_by_name(gpu: str) -> None:
    card = device.planned(gpu=gpu)
    assert card is not None
    assert card.free_bytes == card.total_bytes == int(23.6 * GIB)


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
