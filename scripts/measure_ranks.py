"""Runs one measured case as several ranks, each a fresh process, and samples the main memory of all of them together.

Used by measure_runs.py. With one GPU for all ranks each poses as a machine of its own: NCCL refuses two ranks on one
device otherwise, and then talks over the loopback. What a rank's allocator holds does not depend on that.

    python scripts/measure_ranks.py CASE.json ROW.json       (one rank; started by `run`)
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import command_line


SCRIPT = Path(__file__)
PAUSE = 0.1
RESIDENT = ("RssAnon", "RssFile", "RssShmem")
LOOPBACK = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
SHARED = (
    "load_peak_allocated_gib", "loaded_allocated_gib", "peak_allocated_gib", "peak_reserved_gib",
    "save_peak_allocated_gib", "pinned_gib", "host_peak_rss_gib", "card_used_gib", "card_reserved_gib",
    "trainable_params", "start_seconds",
)  # fmt: skip
"""What is noted for each rank; of the peaks the largest stands in the row itself."""


def environment(rank: int, world: int, port: int, *, one_gpu: bool) -> dict[str, str]:
    """What torchrun would set for a rank, and what NCCL needs where all of them share a GPU."""
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if one_gpu else str(rank),
        "LOCAL_WORLD_SIZE": "1" if one_gpu else str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HF_DATASETS_CACHE": str(Path(tempfile.gettempdir()) / "measure" / f"cache_{port}_{rank}"),
    }
    return env | LOOPBACK | {"NCCL_HOSTID": f"rank{rank}"} if one_gpu and world > 1 else env


def launched(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """What `accelerate launch --config_file` sets for a configuration, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = folder / "accelerate.yaml"
    file.write_text(json.dumps({"num_processes": 2, "num_machines": 1, "machine_rank": 0} | config))  # YAML takes it
    found, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    )
    env = prepare_multi_gpu_env(found)
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def free_port() -> int:
    """A port that nothing listens on, so that measurements can run beside each other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(case: dict[str, Any], port: int, *, one_gpu: bool) -> dict[str, Any]:
    """Runs a case and returns its row: the largest peaks, `per_rank`, and main memory of all ranks at once.

    `host_total_gib` is the highest sum of what the ranks hold themselves (RssAnon, RssShmem) plus the largest RssFile,
    because mapped files are the same pages in all of them; `host_own_gib` is that sum without mapped files.
    """
    import measure_runs

    started, world = time.time(), case["ranks"]
    measure_runs.arguments(case)  # writes the data, before several ranks would
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case))
        asked = launched(case["accelerate"], folder) if "accelerate" in case else {}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder / "case.json"), str(folder / f"{rank}.json")],
                env=os.environ | asked | environment(rank, world, port, one_gpu=one_gpu),
            )
            for rank in range(world)
        ]
        memory = _watch(ranks)
        rows = [_row(folder / f"{rank}.json") for rank in range(world)]
    row: dict[str, Any] = {"id": case["id"]} | rows[0] | memory
    row |= {"one_gpu": one_gpu and world > 1, "ranks_wait": True}
    row["ok"] = all(other["ok"] for other in rows)
    for other in reversed(rows):  # what a rank says goes before that another was killed for it
        if not other["ok"] and other.get("error") != "killed":
            row |= {key: other[key] for key in ("error", "out_of_memory") if key in other}
    row["per_rank"] = [{key: other[key] for key in SHARED if key in other} for other in rows]
    for key in SHARED[:5]:
        values = [other[key] for other in rows if key in other]
        row |= {key: max(values)} if values else {}
    return row | {"wall_seconds": round(time.time() - started, 1)}


def _row(file: Path) -> dict[str, Any]:
    """What a rank wrote, or that it was killed."""
    return json.loads(file.read_text()) if file.exists() else {"ok": False, "error": "killed"}


def _watch(ranks: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """Samples the ranks' main memory until all are gone; one that fails takes the others with it."""
    own = total = 0.0
    parts = dict.fromkeys(RESIDENT, 0.0)
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            time.sleep(5)
            for rank in ranks:
                rank.kill()
        seen = [_resident(rank.pid) for rank in ranks]
        held = sum(one["RssAnon"] + one["RssShmem"] for one in seen)
        own, total = max(own, held), max(total, held + max(one["RssFile"] for one in seen))
        parts = {name: max(parts[name], sum(one[name] for one in seen)) for name in RESIDENT}
        time.sleep(PAUSE)
    return {"host_own_gib": round(own, 3), "host_total_gib": round(total, 3)} | {
        f"host_{name.lower()}_gib": round(value, 3) for name, value in parts.items()
    }


def _resident(pid: int) -> dict[str, float]:
    """Resident memory of a process by kind in GiB; zeros once it is gone."""
    found = dict.fromkeys(RESIDENT, 0.0)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) / 2**20
    return found


def build_cpu_adam() -> None:
    """Builds DeepSpeed's CPU optimizer once, before several processes would at the same time."""
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL)


def main() -> None:
    """One rank."""
    import measure_runs

    if len(sys.argv) != 3:
        command_line.fail("this is one rank of a case; measure_runs.py starts it")
    case, row = Path(sys.argv[1]), Path(sys.argv[2])
    result = measure_runs.run_case(json.loads(case.read_text()))
    row.write_text(json.dumps(result))
    sys.stdout.flush()
    while result["ok"] and len(list(row.parent.glob("[0-9]*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(PAUSE)  # in a training with checkpoints nobody leaves while the first rank saves
    os._exit(0 if result["ok"] else 1)  # communication threads may not end by themselves


if __name__ == "__main__":
    main()
