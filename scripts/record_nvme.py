"""Counts what two processes with DeepSpeed keep on disk and in swap buffers.

usage: for RANK in 0 1; do WORLD_SIZE=2 RANK=$RANK python scripts/record_nvme.py [--accept] FOLDER & done; wait

With --accept it is written to tests/recorded_nvme.json, else printed. A new folder in FOLDER takes what is offloaded,
and is deleted afterwards; it is the place of an NVMe, and any disk that allows direct reads and writes will do. The
model and the configurations are those of the file. Noted of every run are the bytes of the files there, of the swap
buffers, of optimizer states that lie outside of these before each micro-step and at the end, and of gradients that do
before each step; and how many elements count as gathered after each module, a line for each micro-step. Of a run that
DeepSpeed ends itself the sentence is noted. Needs libaio, deepspeed and some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import command_line
from record_deepspeed import prepare, train


FILE = Path(__file__).resolve().parents[1] / "tests" / "recorded_nvme.json"
OFFLOADS = ("offload_optimizer", "offload_param")


def located(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with a folder for what it offloads to an NVMe."""
    section = dict(config["zero_optimization"])
    for key in OFFLOADS:
        if section.get(key, {}).get("device") == "nvme":
            section[key] = section[key] | {"nvme_path": str(folder)}
    return config | {"zero_optimization": section}


def remember_pinned() -> None:
    """Has DeepSpeed's CPU accelerator tell what it was asked to page-lock, as a GPU's does: swapping insists on it."""
    from deepspeed.accelerator import get_accelerator

    accelerator, pinned = get_accelerator(), {}

    def pin(tensor: Any, align_bytes: int = 1) -> Any:
        pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    accelerator.pin_memory = pin
    accelerator.is_pinned = lambda tensor: tensor.untyped_storage().data_ptr() in pinned


def tensor_bytes(tensor: Any) -> int:
    """Bytes that a tensor keeps alive."""
    return int(tensor.untyped_storage().nbytes())


def buffer_bytes(engine: Any) -> dict[str, int]:
    """Swap buffers of this rank."""
    found = {"optimizer": sum(map(tensor_bytes, buffers_of(engine)))}
    swappers = {id(p.nvme_swapper): p.nvme_swapper for p in engine.module.parameters() if p.nvme_swapper is not None}
    if swappers:
        found["param"] = sum(tensor_bytes(swapper.buffers) for swapper in swappers.values())
        reuse = [swapper.partitioned_swap_buffer for swapper in swappers.values()]
        found["written_back"] = sum(tensor_bytes(buffer) for buffer in reuse if buffer is not None)
        found["flat"] = sum(map(tensor_bytes, engine.optimizer.param_groups_fp16_flat_cpu_memory))
    return found


def buffers_of(engine: Any) -> list[Any]:
    """The optimizer's swap buffers."""
    swapper = engine.optimizer.optimizer_swapper
    return [] if swapper is None else list(swapper.swap_buffer_manager.all_buffers)


def outside_bytes(engine: Any, tensors: Iterable[Any]) -> int:
    """What tensors keep alive outside of the optimizer's swap buffers."""
    inside = {b.untyped_storage().data_ptr() for b in buffers_of(engine)}
    found = {tensor.untyped_storage().data_ptr(): tensor_bytes(tensor) for tensor in tensors}
    return sum(size for place, size in found.items() if place not in inside)


def state_bytes(engine: Any) -> int:
    """Adam's states in memory of their own."""
    states = [value for state in engine.optimizer.optimizer.state.values() for value in state.values()]
    return outside_bytes(engine, (value for value in states if getattr(value, "ndim", 0)))


def watch_gradients(engine: Any, found: list[int]) -> None:
    """Notes before each step what float32 gradients still lie where they were made."""
    step = engine.optimizer.step

    def noting(*args: Any, **kwargs: Any) -> Any:
        infos = engine.optimizer.optimizer_swapper.swap_params_info.values()
        found.append(outside_bytes(engine, (grad for info in infos for grad in info.unswapped_gradients.values())))
        return step(*args, **kwargs)

    engine.optimizer.step = noting


def watch_gathering(steps: list[list[int]]) -> Callable[[], None]:
    """Notes how many elements DeepSpeed counts as gathered after each module."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    fetch = Coordinator.fetch_sub_module

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        fetch(self, *args, **kwargs)
        steps[-1].append(self._PartitionedParameterCoordinator__n_available_params)

    def restore() -> None:
        Coordinator.fetch_sub_module = fetch

    Coordinator.fetch_sub_module = noting
    return restore


def record(model: dict[str, Any], run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What this rank holds and writes in a run."""
    rank, steps, states, waiting = os.environ["RANK"], [], [], []
    engine = prepare(model, located(run["deepspeed"], folder), lora=run["lora"])
    restore = watch_gathering(steps)
    if buffers_of(engine):
        watch_gradients(engine, waiting)
    found: dict[str, Any] = {"buffers": buffer_bytes(engine)}
    try:
        for _ in train(engine, model["vocab_size"]):
            states.append(state_bytes(engine))
            steps.append([])
        states.append(state_bytes(engine))
    except AssertionError as error:
        found["error"] = str(error)
    finally:
        restore()
    mine = [path for path in folder.rglob(f"rank{rank}/*") if path.is_file()]
    kinds = {"param": "param.tensor", "gradient": "gradient"}
    for path in mine:
        kind = next((name for name, part in kinds.items() if part in path.name), "optimizer")
        found.setdefault("disk", {}).setdefault(kind, 0)
        found["disk"][kind] += path.stat().st_size
    return found | {"states": states, "waiting": waiting, "available": [" ".join(map(str, step)) for step in steps]}


def main() -> None:
    """One rank; the first one tells what all of them counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where a folder for what is offloaded is made")
    accept = command_line.accepts(__doc__, FILE, parser)
    place = parser.parse_args().folder
    rank, world = command_line.rank()
    if not place.is_dir():
        command_line.fail(f"{place} is not a folder")
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29812",
    }
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        command_line.fail("DeepSpeed cannot build its async_io here, which needs libaio's headers")
    deepspeed.init_distributed(dist_backend="gloo")
    remember_pinned()
    known = json.loads(FILE.read_text())
    for run in known["runs"].values():
        made: list[Any] = [tempfile.mkdtemp(prefix="record_nvme.", dir=place) if rank == 0 else None]
        torch.distributed.broadcast_object_list(made)
        found: list[Any] = [None] * world
        try:
            torch.distributed.all_gather_object(found, record(known["model"], run, Path(made[0])))
        finally:
            if rank == 0:
                shutil.rmtree(made[0], ignore_errors=True)
        lines = [each.pop("available") for each in found]
        assert all(line == lines[0] for line in lines), "ranks gather differently"
        run |= {"ranks": found, "available": lines[0]}
        torch.distributed.barrier()
    if rank == 0:
        command_line.tell_record(FILE, known, accept=accept)


if __name__ == "__main__":
    main()
