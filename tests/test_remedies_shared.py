"""What is proposed to several GPUs: ZeRO where LLaMA-Factory takes it, and never beside FSDP."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import memory
from llamafactory_preflight.advice import changes, remedies
from llamafactory_preflight.arguments import paths
from llamafactory_preflight.memory import Ranks
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.run import from_arguments
from test_fsdp import config
from test_remedies import GIB, Case, arguments, fitting, shape
from test_remedies import SOFTWARE as ALONE


SOFTWARE = dataclasses.replace(ALONE, deepspeed="0.18.4", accelerate="1.11.0")
ROOT = Path(__file__).resolve().parents[1]
FRACTIONS = (0.3, 0.5, 0.7)
RANKS = Ranks(world=2, local=2)
LAUNCHED = fsdp.from_accelerate(config(version=1), origin="fsdp.yaml")
SETTINGS: list[dict[str, Any]] = [
    {"finetuning_type": "full"},
    {"finetuning_type": "full", "pure_bf16": True, "bf16": False},
    {"per_device_train_batch_size": 4, "cutoff_len": 4096},
    {"quantization_bit": 4, "cutoff_len": 8192},
    {"pissa_init": True, "cutoff_len": 4096},
    {"finetuning_type": "full", "val_size": 0.1, "eval_strategy": "steps"},
]
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def found(folder: Path, *, launched: dict[str, str] | None) -> list[Case]:
    """Runs of two ranks that do not fit, each with what is proposed for it."""
    out = []
    shards = changes.deepspeed_files(paths.pack_folder())
    assert len(shards) == 4
    for size, settings, fraction in itertools.product(("1.7b", "8b"), SETTINGS, FRACTIONS):
        if launched is not None and ("pure_bf16" in settings or "pissa_init" in settings):
            continue  # have no formula
        given = arguments(settings, folder)
        run = dataclasses.replace(from_arguments(given, software=SOFTWARE, origin="test"), accelerate=launched)
        predict = partial(memory.estimate, shape=shape(size), software=SOFTWARE, ranks=RANKS)
        budget = int(max(predict(run).phases.values()) * fraction)
        proposed = remedies.remedies(
            run, "qwen3", software=SOFTWARE, predict=predict, fits=fitting(budget), shards=shards
        )
        out.append(Case(name=f"{size} {settings} {fraction}", given=given, run=run, budget=budget, found=proposed))
    return out


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return found(tmp_path_factory.mktemp("out"), launched=None)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return found(tmp_path_factory.mktemp("out"), launched=LAUNCHED)


@pytest.fixture
def accepts(run: Any, tmp_path: Path) -> Any:
    """What LLaMA-Factory's parser says in a rank.

    Where DeepSpeed is not installed, its place is taken by a package of its name that starts the processes' group; the
    parser asks no more of it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        (tmp_path / "deepspeed").mkdir()
        (tmp_path / "deepspeed/__init__.py").write_text("__version__ = '0.18.4'\n")
        (tmp_path / "deepspeed/comm.py").write_text(
            "from torch.distributed import *\n"
            "def init_distributed(dist_backend=None, **_):\n"
            "    is_initialized() or init_process_group('gloo')\n"
        )
        (tmp_path / "deepspeed-0.18.4.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.4\n"
        (tmp_path / "deepspeed-0.18.4.dist-info/METADATA").write_text(metadata)

    def ask(cases: list[dict[str, Any]], **env: str) -> list[str | None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranked = RANK | {"MASTER_PORT": port, "PYTHONPATH": str(tmp_path), "LLAMAFACTORY_PREFLIGHT": "off"} | env
        script = Path(__file__).with_name("rank_parser.py")
        done = run([sys.executable, script], cwd=ROOT, env=ranked, input=json.dumps(cases))
        assert done.returncode == 0, done.stderr[-3000:]
        answers: list[str | None] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return ask


def changed(cases: list[Case], *, with_zero: bool) -> list[dict[str, Any]]:
    given = [case.given | dict(remedy.set) for case in cases for remedy in case.found]
    return [one for one in given if ("deepspeed" in one) == with_zero]


def test_llamafactory_takes_what_is_proposed_to_each_rank(replicated: list[Case], accepts: Any) -> None:
    shared, others = (changed(replicated, with_zero=with_zero) for with_zero in (True, False))
    assert len(shared) >= 10 and len(others) >= 20
    assert len({one["deepspeed"] for one in shared}) >= 3, "several files"
    assert set(accepts(shared + others)) == {None}


def test_the_parser_does_refuse_what_is_not_proposed(tmp_path: Path, accepts: Any) -> None:
    third = {"deepspeed": "deepspeed_configs/zero3.json"}
    refused = [
        {"pure_bf16": True, "bf16": False, "finetuning_type": "full"},
        {"pissa_init": True},
        {"use_galore": True, "finetuning_type": "full"},
    ]
    answers = accepts([arguments(settings | third, tmp_path) for settings in refused])
    assert all("DeepSpeed" in str(answer) for answer in answers), answers


def test_zero_is_never_proposed_beside_fsdp(sharded: list[Case], accepts: Any) -> None:
    assert sum(bool(case.found) for case in sharded) >= 10
    assert changed(sharded, with_zero=True) == []
    assert LAUNCHED is not None
    assert set(accepts(changed(sharded, with_zero=False), **LAUNCHED)) == {None}


def test_each_remedy_fits_one_rank(replicated: list[Case], sharded: list[Case]) -> None:
    for case in (*replicated, *sharded):
        assert case.budget < 400 * GIB
        assert all(fitting(case.budget)(remedy.estimate) for remedy in case.found), case.name
