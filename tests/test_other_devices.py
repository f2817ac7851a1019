"""AMD, Ascend and Apple devices, from recorded environments: none of them is here."""

from __future__ import annotations

import platform
import sys
from functools import partial
from pathlib import Path

import pytest

from llamafactory_preflight import device
from llamafactory_preflight.device import Process, amd, apple, ascend, torch_build
from llamafactory_preflight.device.torch_build import TorchBuild
from llamafactory_preflight.units import GIB, MIB


# `/sys/class/kfd/kfd/topology/nodes/*/properties` of a server with MI300X, the lines that matter and a few that don't.
PROCESSOR = "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\ngfx_target_version 0\n"
MI300X = (
    "cpu_cores_count 0\nsimd_count 1216\nmem_banks_count 1\ncaches_count 512\ngfx_target_version 90402\n"
    "vendor_id 4098\ndevice_id 29857\ndrm_render_minor {minor}\nunique_id {unique}\nnum_xcc 8\n"
)
TOTAL = 206141652992


def server(sysfs: Path, *, cards: int = 2, apu: bool = False) -> Path:
    nodes = sysfs / "class/kfd/kfd/topology/nodes"
    for number in range(1 + cards):
        (nodes / str(number)).mkdir(parents=True)
    (nodes / "0/properties").write_text(PROCESSOR)
    (nodes / "0/gpu_id").write_text("0\n")
    for number in range(1, 1 + cards):
        minor = 120 + 8 * number
        properties = MI300X.format(minor=minor, unique=0x1C6EB7C2B5E34B60 + number)
        if apu:
            properties = properties.replace("cpu_cores_count 0", "cpu_cores_count 24")
        (nodes / str(number) / "properties").write_text(properties)
        (nodes / str(number) / "gpu_id").write_text(f"{1000 + number}\n")
        render = sysfs / f"class/drm/renderD{minor}/device"
        render.mkdir(parents=True)
        (render / "mem_info_vram_total").write_text(f"{TOTAL}\n")
        (render / "mem_info_vram_used").write_text(f"{300 * MIB + (20 * GIB if number == 2 else 0)}\n")
    holder = sysfs / "class/kfd/kfd/proc/4000001"
    holder.mkdir(parents=True)
    (holder / "vram_1001").write_text("0\n")
    (holder / "vram_1002").write_text(f"{19 * GIB}\n")
    return sysfs


def test_amd_cards_from_the_kernels_files(tmp_path: Path) -> None:
    first, second = amd.devices({}, sysfs=server(tmp_path))
    assert (first.name, first.kind, first.total_bytes) == ("AMD gfx942", "rocm", TOTAL)
    assert first.free_bytes == TOTAL - 300 * MIB and first.processes == ()
    assert first.compute_capability is None, "the rules for NVIDIA's generations do not hold"
    assert (second.index, second.physical_index, second.uuid) == (1, 2, "GPU-1c6eb7c2b5e34b62")
    assert second.processes == (Process(pid=4000001, used_bytes=19 * GIB),)
    (tmp_path / "class/drm/renderD128/device/product_name").write_text("AMD Instinct MI300X OAM\n")
    assert amd.devices({}, sysfs=tmp_path)[0].name == "AMD Instinct MI300X OAM"


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [2, 1]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1c6eb7c2b5e34b62"}, [2]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_amd_cards_that_are_visible(tmp_path: Path, environ: dict[str, str], numbers: list[int]) -> None:
    assert [card.physical_index for card in amd.devices(environ, sysfs=server(tmp_path))] == numbers


def test_an_amd_card_that_shares_main_memory_has_no_known_size(tmp_path: Path) -> None:
    (card,) = amd.devices({}, sysfs=server(tmp_path / "one", cards=1, apu=True))
    assert (card.total_bytes, card.free_bytes) == (None, None)
    sysfs = server(tmp_path / "other", cards=1)
    (sysfs / "class/drm/renderD128/device/mem_info_vram_total").write_text(f"{512 * MIB}\n")
    (card,) = amd.devices({}, sysfs=sysfs)
    assert (card.total_bytes, card.free_bytes) == (None, None)


def test_without_amds_driver_there_is_nothing(tmp_path: Path) -> None:
    assert amd.devices({}, sysfs=tmp_path) == ()
    nodes = server(tmp_path) / "class/kfd/kfd/topology/nodes"
    (nodes / "1/properties").write_text("")  # what a container may not use reads as empty
    (nodes / "2/properties").write_text("simd_count many\n\0\xff\n")
    assert amd.devices({}, sysfs=tmp_path) == ()


def test_a_torch_for_rocm_looks_for_amd_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: TorchBuild(hip="6.4.43482"))
    monkeypatch.setattr(amd, "devices", partial(amd.devices, sysfs=server(tmp_path)))
    assert [card.kind for card in device.visible({})] == ["rocm", "rocm"]


# As `npu-smi info` prints it on servers with two 910B3 (one row a chip) and with a 910C (two chips a card).
NPU_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3341 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | -           33                0    / 0             |
| 0                         | 0000:01:00.0  | 35          0    / 0          34102/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 4000001       | python3.1                | 30720                   |
+===========================+===============+====================================================+
"""
NPU_910C = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
| 0       1                 | 632268        | python3.1          | 197                   | NA                      |
"""


def test_ascend_npus_from_their_tool() -> None:
    first, second = ascend.listed(NPU_910B, {})
    assert (first.name, first.kind, first.total_bytes) == ("Ascend 910B3", "npu", 64 * GIB)
    assert first.free_bytes == (65536 - 3341) * MIB
    assert first.taken_bytes == 0, "what an idle one shows as used belongs to nobody"
    assert second.processes == (Process(pid=4000001, name="python3.1", used_bytes=30720 * MIB),)
    assert second.taken_bytes == 30720 * MIB and second.hidden_bytes == 0


def test_two_chips_of_one_card_are_two_devices() -> None:
    first, second = ascend.listed(NPU_910C, {})
    assert (first.name, first.index, second.index) == ("Ascend910", 0, 1)
    assert second.free_bytes == (65536 - 3195) * MIB
    assert first.processes == () and second.processes[0].pid == 632268
    (chosen,) = ascend.listed(NPU_910C, {"ASCEND_RT_VISIBLE_DEVICES": "1"})
    assert (chosen.index, chosen.physical_index) == (0, 1)


@pytest.mark.parametrize("text", ["", "dcmi module initialize failed. ret is -8005", NPU_910B[:900], "|" * 5000])
def test_other_answers_of_the_tool_are_no_devices(text: str) -> None:
    assert len(ascend.listed(text, {})) <= 1


def test_the_tool_is_asked_where_torch_npu_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!{sys.executable}\nprint({NPU_910B!r})\n")
    tool.chmod(0o755)
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [found.kind for found in device.visible({})] != ["npu", "npu"]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [found.kind for found in device.visible({})] == ["npu", "npu"]
    tool.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    assert ascend.devices({}) == ()


SYSCTL = "machdep.cpu.brand_string: Apple M3 Max\nhw.memsize: 68719476736\niogpu.wired_limit_mb: {limit}\n"
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                             1310720.
Pages active:                            500000.
Pages inactive:                          655360.
Pages speculative:                            0.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                              0.
"Translation faults":                1000000000.
"""


def test_apples_gpu_has_a_share_of_main_memory() -> None:
    (gpu,) = apple.described(SYSCTL.format(limit=0), VM_STAT)
    assert (gpu.name, gpu.kind, gpu.total_bytes, gpu.free_bytes) == ("Apple M3 Max", "mps", 48 * GIB, 30 * GIB)
    assert gpu.context_bytes == 0
    (raised,) = apple.described(SYSCTL.format(limit=60 * 1024), VM_STAT)
    assert raised.total_bytes == 60 * GIB
    (untold,) = apple.described(SYSCTL.format(limit=0), "")
    assert untold.free_bytes is None
    assert apple.described("", "") == ()


@pytest.mark.skipif(platform.system() == "Darwin", reason="this is a Mac")
def test_elsewhere_there_is_none() -> None:
    assert apple.devices() == ()
