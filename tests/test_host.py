from __future__ import annotations

from pathlib import Path

import pytest

from llamafactory_preflight import host


MIB = 1024**2


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    1048576 kB\n")
    return tmp_path


def available(machine: Path) -> int | None:
    return host.available_bytes(meminfo=machine / "meminfo", cgroups=machine / "cgroup", cgroup_root=machine / "fs")


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_limit_it_is_what_the_machine_has(machine: Path) -> None:
    assert available(machine) == 1024 * MIB


def test_version_2_takes_the_tightest_level_and_counts_inactive_cache_as_free(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/outer/inner\n")
    group(machine / "fs", memory__stat="")
    group(machine / "fs/outer", memory__max=500 * MIB, memory__current=300 * MIB)
    (machine / "fs/outer/memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\n")
    group(machine / "fs/outer/inner", memory__max="max", memory__current=1)
    assert available(machine) == 250 * MIB


def test_version_1(machine: Path) -> None:
    (machine / "cgroup").write_text("5:cpu:/x\n4:memory:/job\n")
    group(machine / "fs/memory/job", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=100 * MIB)
    group(machine / "fs/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert available(machine) == 300 * MIB


def test_in_a_container_the_named_group_may_not_exist(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/kubepods/pod1\n")
    group(machine / "fs", memory__max=200 * MIB, memory__current=50 * MIB)
    assert available(machine) == 150 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available(tmp_path) is None


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = host.free_disk_bytes(tmp_path / "not" / "yet")
    assert free is not None and free > 0
