from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamafactory_preflight.machine import cgroups, host
from llamafactory_preflight.machine.host import MainMemory


MIB = 1024**2
V2 = "41 31 0:38 {root} {mount} rw,relatime - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {root} {mount} rw,relatime shared:1 - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    1048576 kB\nSwapFree: 8000000 kB\n")
    return tmp_path


def memory(machine: Path) -> MainMemory | None:
    return host.main_memory(meminfo=machine / "meminfo", process=machine, default_mount=machine / "fs")


def available(machine: Path) -> int | None:
    found = memory(machine)
    return found.available_bytes if found else None


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_limit_it_is_what_the_machine_has_without_its_swap(machine: Path) -> None:
    assert memory(machine) == MainMemory(available_bytes=1024 * MIB, total_bytes=9000000 * 1024)


def test_version_2_takes_the_tightest_level_and_counts_the_cache_of_files_as_free(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/outer/inner\n")
    group(machine / "fs", memory__stat="")
    group(machine / "fs/outer", memory__max=500 * MIB, memory__current=300 * MIB)
    (machine / "fs/outer/memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\nactive_file {10 * MIB}\n")
    group(machine / "fs/outer/inner", memory__max="max", memory__high="max", memory__current=1)
    assert memory(machine) == MainMemory(
        available_bytes=260 * MIB,
        total_bytes=9000000 * 1024,
        limit_bytes=500 * MIB,
        limited_by=machine / "fs/outer",
    )


def test_what_is_throttled_counts_as_limited(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/job\n")
    group(machine / "fs/job", memory__max=800 * MIB, memory__high=400 * MIB, memory__current=100 * MIB)
    assert available(machine) == 300 * MIB


def test_a_limit_above_what_the_machine_has_decides_nothing(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/job\n")
    group(machine / "fs/job", memory__max=8000 * MIB, memory__current=0)
    found = memory(machine)
    assert found is not None and (found.available_bytes, found.limited_by) == (1024 * MIB, None)


def test_a_group_that_is_over_its_limit_has_nothing_left(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/job\n")
    group(machine / "fs/job", memory__max=100 * MIB, memory__current=101 * MIB)
    assert available(machine) == 0


def test_version_1(machine: Path) -> None:
    (machine / "cgroup").write_text("5:cpu:/x\n4:memory:/job\n")
    group(machine / "fs/memory/job", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=100 * MIB)
    group(machine / "fs/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert available(machine) == 300 * MIB


def test_version_1_tells_of_a_limit_above_the_container(machine: Path) -> None:
    (machine / "cgroup").write_text("4:memory:/docker/abc\n")
    (machine / "mountinfo").write_text(V1.format(root="/docker/abc", mount=machine / "mem"))
    none = 9223372036854771712
    group(machine / "mem", memory__limit_in_bytes=none, memory__usage_in_bytes=100 * MIB)
    group(machine / "mem", memory__stat=f"hierarchical_memory_limit {700 * MIB}\ntotal_inactive_file 0")
    assert available(machine) == 600 * MIB


def test_in_a_container_the_named_group_may_not_exist(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/kubepods/pod1\n")
    group(machine / "fs", memory__max=200 * MIB, memory__current=50 * MIB)
    assert available(machine) == 150 * MIB


def test_a_group_inside_of_a_container_is_found_below_what_is_mounted_there(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/docker/abc/worker\n")
    (machine / "mountinfo").write_text(V2.format(root="/docker/abc", mount=machine / "elsewhere"))
    group(machine / "elsewhere", memory__max=900 * MIB, memory__current=0)
    group(machine / "elsewhere/worker", memory__max=200 * MIB, memory__current=50 * MIB)
    assert available(machine) == 150 * MIB


def test_both_versions_side_by_side(machine: Path) -> None:
    (machine / "cgroup").write_text("4:memory:/job\n0::/\n")
    mounts = V1.format(root="/", mount=machine / "memory") + V2.format(root="/", mount=machine / "unified")
    (machine / "mountinfo").write_text(mounts)
    group(machine / "unified")
    group(machine / "memory/job", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=100 * MIB)
    assert available(machine) == 300 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert memory(tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert memory(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "garbage", "0::", "4:memory", ":::::", "0::/../..", "\0", "4:memory:/a\0b", "0::/" + "x" * 9000]
)
def test_a_file_that_reads_otherwise_limits_nothing(machine: Path, text: str) -> None:
    (machine / "cgroup").write_text(text)
    (machine / "mountinfo").write_text(text)
    assert available(machine) == 1024 * MIB


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real group below this process's own that allows 300 MiB; the test is left out where none may be made."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if "memory" in line), "0::/")
    number, _, path = own.split(":", 2)
    version_2 = number == "0"
    top = Path("/sys/fs/cgroup") if version_2 else Path("/sys/fs/cgroup/memory")
    folder = top / path.lstrip("/") / f"preflight-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group may be made here: {error}")
    try:
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(300 * MIB))
        yield folder
    except OSError as error:
        pytest.skip(f"no limit may be set here: {error}")
    finally:
        folder.rmdir()


def test_a_real_limit_is_seen_and_is_where_the_kernel_kills(limited_group: Path, tmp_path: Path) -> None:
    """Reads a file twice, so that it is active cache, and then takes what is told to be available, and more."""
    (tmp_path / "file").write_bytes(os.urandom(MIB) * 120)
    script = """if True:
        import sys
        from pathlib import Path
        from llamafactory_preflight.machine import host
        group, file = Path(sys.argv[1]), Path(sys.argv[2])
        (group / "cgroup.procs").write_text("0")
        for _ in range(3):
            file.read_bytes()
        found = host.main_memory()
        print(found.limit_bytes, found.available_bytes, found.limited_by, flush=True)
        taken = bytearray(found.available_bytes - 8 * 2**20)
        print("got it", flush=True)
        more = bytearray(24 * 2**20)
        print("and more", flush=True)
    """
    command = [sys.executable, "-c", script, str(limited_group), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    figures, *rest = done.stdout.splitlines()
    limit, told, folder = figures.split()
    assert (int(limit), folder) == (300 * MIB, str(limited_group))
    assert 200 * MIB < int(told) < 300 * MIB
    assert rest == ["got it"] and done.returncode == -9


def test_the_real_machine_is_read() -> None:
    found = host.main_memory()
    assert found is not None and 0 < found.available_bytes <= found.total_bytes
    assert all(limit.limit_bytes < cgroups.NO_LIMIT for limit in cgroups.limits())


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = host.free_disk_bytes(tmp_path / "not" / "yet")
    assert free is not None and free > 0
    assert host.existing_parent(tmp_path / "not" / "yet") == tmp_path
    (tmp_path / "file").write_text("")
    assert host.existing_parent(tmp_path / "file" / "below") == tmp_path


def test_windows_is_seen_below_linux(tmp_path: Path) -> None:
    kernel = tmp_path / "osrelease"
    kernel.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert host.is_wsl({}, kernel=kernel)
    kernel.write_text("6.8.0-45-generic\n")
    assert not host.is_wsl({"WSL_DISTRO_NAME": "left over"}, kernel=kernel)
    assert not host.is_wsl({}, kernel=tmp_path / "none")
