"""Notes what ZeRO-3 gathers in real LLaMA-Factory runs.

usage: for RANK in 0 1; do WORLD_SIZE=2 RANK=$RANK python scripts/record_stages.py [--accept] RUN & done; wait

With --accept it is written to tests/recorded_stages.json, else printed. Two processes with DeepSpeed on the CPU make
two steps of a small model, as the file says under the name RUN. Noted is how many elements DeepSpeed counts as
gathered after each module that it meets, a line for each forward of a model and all that follows it, and which of
DeepSpeed's engines that belongs to. Needs deepspeed and a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import command_line


FILE = Path(__file__).resolve().parents[1] / "tests" / "recorded_stages.json"
FOLDER = Path(tempfile.gettempdir()) / "record_stages"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29813", "OMP_NUM_THREADS": "1"}


def watch() -> list[dict[str, Any]]:
    """Makes DeepSpeed note the forwards of its engines in a list, which is returned."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    forwards: list[dict[str, Any]] = []
    engines: list[Coordinator] = []
    fetch, reset = Coordinator.fetch_sub_module, Coordinator.reset_step

    def fetching(self: Coordinator, *args: Any, **kwargs: Any) -> None:
        fetch(self, *args, **kwargs)
        forwards[-1]["available"].append(self._PartitionedParameterCoordinator__n_available_params)

    def resetting(self: Coordinator) -> None:
        reset(self)
        if self not in engines:
            engines.append(self)
        forwards.append({"engine": engines.index(self), "available": []})

    Coordinator.fetch_sub_module, Coordinator.reset_step = fetching, resetting
    return forwards


def main() -> None:
    """One rank; the first one tells what it noted."""
    known = json.loads(FILE.read_text())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=list(known["runs"]), metavar="RUN", help=", ".join(known["runs"]))
    accept = command_line.accepts(__doc__, FILE, parser)
    name = parser.parse_args().name
    rank, _ = command_line.rank()
    own = {"HF_DATASETS_CACHE": str(FOLDER / f"cache_{rank}"), "MEASURE_ROOT": str(FOLDER / f"rank_{rank}")}
    os.environ |= ENVIRONMENT | own | {"LOCAL_RANK": str(rank)}
    import measure_runs

    os.environ |= measure_runs.ENVIRONMENT
    import deepspeed
    from llamafactory.train import tuner
    from llamafactory.train.rm import workflow as reward
    from transformers import Trainer, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    reward.fix_valuehead_checkpoint = Trainer.save_model = lambda *_, **__: None
    run = known["runs"][name]
    measure_runs.write_model(run["model"], known["models"][run["model"]])
    deepspeed.init_distributed(dist_backend="gloo")
    forwards = watch()
    tuner.run_exp(measure_runs.arguments({"id": name, "model": run["model"], "args": known["args"] | run["args"]}))
    run["forwards"] = [one | {"available": " ".join(map(str, one["available"]))} for one in forwards]
    if rank == 0:
        command_line.tell_record(FILE, known, accept=accept)
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
