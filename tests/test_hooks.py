"""The patch points exist in the installed LLaMA-Factory and are what hooks.py takes them for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from llamafactory_preflight import hooks


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a snippet in a new interpreter of this environment, where the plugin is installed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMAFACTORY")} | variables
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, env=env)


def output(code: str, **variables: str) -> str:
    """Standard output of a snippet that must succeed and be silent on standard error."""
    done = run(code, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def package_folder() -> Path:
    spec = util.find_spec("llamafactory")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What an interpreter of its own sees of every patch point; this one stays free of torch."""
    code = """
import importlib, inspect, json, sys
from llamafactory_preflight import hooks
facts = {}
for point in hooks.POINTS:
    module = importlib.import_module(point.module)
    function = getattr(module, point.attribute, None)
    original = inspect.unwrap(function)
    facts[f"{point.module}.{point.attribute}"] = {
        "applied": hooks.is_applied(function),
        "original": [original.__module__, original.__name__, hooks.is_applied(original)],
        "parameters": [[p.name, p.default is None] for p in inspect.signature(original).parameters.values()],
        "names": original.__code__.co_names,
    }
tuner = sys.modules["llamafactory.train.tuner"]
facts["training_names"] = inspect.unwrap(tuner._training_function).__code__.co_names
print(json.dumps(facts))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "llamafactory-preflight" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [f"{point.module}.{point.attribute}" for point in hooks.POINTS])
def test_a_patch_point_exists_and_is_wrapped_once(name: str, facts: dict[str, Any]) -> None:
    assert facts[name]["applied"] is True
    assert facts[name]["original"][2] is False


def test_main_takes_nothing_and_looks_launch_up_when_it_runs(facts: dict[str, Any]) -> None:
    main = facts["llamafactory.cli.main"]
    assert main["parameters"] == []
    assert {"launcher", "launch"} <= set(main["names"])


def test_launch_takes_nothing(facts: dict[str, Any]) -> None:
    assert facts["llamafactory.launcher.launch"]["parameters"] == []


def test_get_train_args_takes_the_arguments_first_and_is_looked_up_when_training_starts(facts: dict[str, Any]) -> None:
    assert facts["llamafactory.train.tuner.get_train_args"]["parameters"][0] == ["args", True]
    assert "get_train_args" in facts["training_names"]


def test_the_command_is_still_there_when_launch_begins() -> None:
    code = """
import sys
from llamafactory import launcher
sys.argv = ["llamafactory-cli", "version", "rest"]
launcher.launch()
print(sys.argv)
"""
    assert output(code).splitlines()[-1] == "['llamafactory-cli', 'rest']"


def test_the_usage_names_our_subcommands() -> None:
    code = "import sys; sys.argv = ['llamafactory-cli', 'help']; from llamafactory.cli import main; main()"
    lines = output(code).splitlines()
    assert [name for name in hooks.SUBCOMMANDS if any(f"llamafactory-cli {name}" in line for line in lines)] == list(
        hooks.SUBCOMMANDS
    )


def test_a_reload_is_wrapped_again_and_the_loader_is_left_as_it_was() -> None:
    code = """
import importlib, inspect
from llamafactory_preflight import hooks
import llamafactory.cli as cli
first = cli.main
importlib.reload(cli)
print(cli.main is not first, hooks.is_applied(cli.main), hooks.is_applied(cli.main.__wrapped__))
print("exec_module" in vars(cli.__loader__), cli.__spec__.loader is cli.__loader__)
print("def main" in inspect.getsource(cli))
hooks.apply(cli)
print(hooks.is_applied(cli.main.__wrapped__))
"""
    assert output(code).split() == ["True", "True", "False", "False", "True", "True", "False"]


def test_a_finder_that_asks_the_others_does_not_run_in_circles() -> None:
    code = """
import sys
class Curious:
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
sys.meta_path.insert(1, Curious())
import llamafactory.cli as cli
from llamafactory_preflight import hooks
print(hooks.is_applied(cli.main), hooks.is_applied(cli.main.__wrapped__))
"""
    assert output(code).split() == ["True", "False"]


def test_threads_that_import_at_the_same_time_get_one_wrapper() -> None:
    code = """
import importlib.util, threading
from llamafactory_preflight import hooks
barrier, seen = threading.Barrier(8), []
def load(name):
    barrier.wait()
    importlib.util.find_spec(name)
    seen.append(importlib.import_module(name))
names = ["llamafactory.cli", "llamafactory.launcher"] * 4
threads = [threading.Thread(target=load, args=(name,)) for name in names]
[t.start() for t in threads], [t.join() for t in threads]
import llamafactory.cli, llamafactory.launcher
functions = [llamafactory.cli.main, llamafactory.launcher.launch]
print(len(seen), *(hooks.is_applied(f) and not hooks.is_applied(f.__wrapped__) for f in functions))
"""
    assert output(code).split() == ["8", "True", "True"]


def test_a_zip_file_is_hooked_too(tmp_path: Path) -> None:
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in package_folder().rglob("*.py"):
            packed.write(file, Path("llamafactory") / file.relative_to(package_folder()))
    code = f"""
import sys
sys.path.insert(0, {str(archive)!r})
import importlib.util
importlib.util.find_spec("llamafactory.launcher")
import llamafactory.cli as cli, llamafactory.launcher as launcher
from llamafactory_preflight import hooks
print(hooks.is_applied(cli.main), hooks.is_applied(launcher.launch), cli.__file__)
"""
    assert output(code).split() == ["True", "True", str(archive / "llamafactory" / "cli.py")]


def test_hooks_that_do_not_import_are_one_warning() -> None:
    code = """
import sys
sys.modules["llamafactory_preflight.hooks"] = None
import llamafactory.cli, llamafactory.launcher
print(callable(llamafactory.cli.main))
"""
    done = run(code)
    assert (done.returncode, done.stdout.strip()) == (0, "True")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("llamafactory-preflight is not active")


@pytest.fixture
def changed_llamafactory(tmp_path: Path) -> Path:
    """A copy of the installed LLaMA-Factory in which `launch` has another name."""
    copy = tmp_path / "llamafactory"
    shutil.copytree(package_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in (
        ("launcher.py", "def launch():", "def lift_off():"),
        ("cli.py", "launcher.launch()", "launcher.lift_off()"),
    ):
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, after), encoding="utf-8")
    return tmp_path


# A process, and a child of it that inherits its environment, as the ranks of torchrun do.
PARENT_AND_CHILD = """
import subprocess, sys
import llamafactory.launcher
if len(sys.argv) > 1:
    from llamafactory.cli import main
    sys.argv = ["llamafactory-cli", "version"]
    sys.exit(main())
sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)
"""


def test_a_missing_patch_point_is_one_warning_in_a_tree_of_processes(changed_llamafactory: Path) -> None:
    script = changed_llamafactory / "program.py"
    script.write_text(PARENT_AND_CHILD)
    done = run(f"import runpy; runpy.run_path({str(script)!r})", PYTHONPATH=str(changed_llamafactory))
    assert done.returncode == 0, done.stderr
    assert "Welcome to LLaMA Factory" in done.stdout
    ours = [line for line in done.stderr.splitlines() if "preflight" in line]
    assert len(ours) == 1
    assert "llamafactory.launcher.launch" in ours[0]


def test_a_missing_patch_point_is_no_news_when_the_plugin_is_off(changed_llamafactory: Path) -> None:
    variables = {"PYTHONPATH": str(changed_llamafactory), "LLAMAFACTORY_PREFLIGHT": "off"}
    assert output("import llamafactory.launcher as l; print(hasattr(l, 'launch'))", **variables) == "False"
