"""The README says what is so: its commands run, and its files, names and switches are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line
]
NOT_RUN_HERE = {
    "scripts/quickstart.sh": "test_presets_run.py runs what it runs, test_scripts.py the script itself",
    "scripts/test.sh": "runs this",
    "pip install .": "would change the environment; test_startup.py installs into fresh ones",
    "llamafactory-cli train 24gb_lora.yaml": "needs a GPU and 16 GB of weights",
}
# config.json of Qwen/Qwen3-8B, as far as memory depends on it.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A hub cache as a finished look-up of Qwen/Qwen3-8B leaves it."""
    repository = tmp_path / "hub/models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots/0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name, encoding="utf-8")
    return tmp_path


def test_commands_run_as_written(run: Any, tmp_path: Path, hub_cache: Path) -> None:
    assert set(NOT_RUN_HERE) <= set(COMMANDS)
    working = tmp_path / "work"
    working.mkdir()
    for command in COMMANDS:
        if command in NOT_RUN_HERE:
            continue
        done = run(shlex.split(command), cwd=working, env={"HF_HOME": str(hub_cache)})
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip(), command
    assert (working / "24gb_lora.yaml").is_file()


def test_the_report_shown_has_the_lines_of_a_real_one(run: Any, tmp_path: Path, hub_cache: Path) -> None:
    shown = re.search(r"^```text\n(llamafactory-preflight .*?)^```", README, re.DOTALL | re.MULTILINE)
    assert shown
    assert run(["llamafactory-cli", "presets", "copy", "24gb_lora"], cwd=tmp_path).returncode == 0
    command = ["llamafactory-cli", "preflight", "24gb_lora.yaml", "--gpu", "24GiB"]
    real = run(command, cwd=tmp_path, env={"HF_HOME": str(hub_cache)}).stdout

    def words(report: str) -> list[str]:  # the amounts change with the model of memory and with the machine
        return re.findall(r"[A-Za-z]{3,}", report)

    assert words(shown[1]) == words(real)


def test_scripts_are_executable() -> None:
    for command in ("scripts/quickstart.sh", "scripts/test.sh"):
        assert command in COMMANDS
        assert (ROOT / command).stat().st_mode & 0o111


def test_startup_files_are_shown_verbatim() -> None:
    for suffix in ("pth", "start"):
        text = (ROOT / f"plugin/llamafactory_preflight.{suffix}").read_text(encoding="utf-8").strip()
        assert re.search(
            rf"^`llamafactory_preflight\.{suffix}`.*\n\n```\w+\n{re.escape(text)}\n```", README, re.MULTILINE
        )


def test_patch_points_and_switches_are_all_named() -> None:
    from llamafactory_preflight import hooks, settings

    startup = README.split("## What runs at Python startup")[1].split("\n## ")[0]
    assert {f"{point.module}.{point.attribute}" for point in hooks.POINTS} == set(
        re.findall(r"`(llamafactory(?:\.\w+)+)`", startup)
    )
    switches = README.split("\n## Switches")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(LLAMAFACTORY_\w+)` \| (.*)$", switches, re.MULTILINE))
    assert set(rows) == {value for name, value in vars(settings).items() if name.endswith("_VARIABLE")}
    assert all(f"`{mode}`" in rows[settings.PREFLIGHT_VARIABLE] for mode in settings.MODES)
    assert all(f"`{mode}`" in rows[settings.TEMPLATE_VARIABLE] for mode in settings.TEMPLATE_MODES)


def test_presets_and_deepspeed_files_are_all_named() -> None:
    files = [*ROOT.glob("presets/*.yaml"), *ROOT.glob("deepspeed_configs/*.json")]
    table = README.split("\n## Presets")[1].split("\n## ")[0]
    assert {str(file.relative_to(ROOT)) for file in files} == set(re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE))


def test_subcommands_are_all_named() -> None:
    from llamafactory_preflight import hooks

    assert all(f"llamafactory-cli {name}" in README for name in hooks.SUBCOMMANDS)


def test_pinned_versions_are_those_of_the_scripts() -> None:
    pins = dict(
        re.findall(r"'(torch|llamafactory)==([\d.]+)'", (ROOT / "scripts/common.sh").read_text(encoding="utf-8"))
    )
    assert f"torch {pins['torch']}, LLaMA-Factory {pins['llamafactory']}" in README
