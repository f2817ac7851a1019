"""What the installed plugin does to an interpreter: a wheel built from this tree, in fresh and empty environments."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import util
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
START_MODULES = {"llamafactory_preflight", "llamafactory_preflight._startup"}
COUNT_FINDERS = "sum(type(f).__module__ == 'llamafactory_preflight._startup' for f in sys.meta_path)"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fresh environments are laid out as on POSIX")


class Environment:
    """A virtual environment of its own, without pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site_packages = next(folder.glob("lib/python*/site-packages"))
        (folder / "share").mkdir(exist_ok=True)  # several dependencies of LLaMA-Factory bring that one
        # site loads a codec for the first .pth file of any kind; that one is not ours to count.
        (self.site_packages / "inert.pth").write_text("# nothing\n")

    def pip(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def install(self, wheel: Path) -> Environment:
        self.pip("install", "--no-deps", "--no-index", wheel)
        return self

    def run(self, code: str, *options: str, cwd: Path | None = None) -> str:
        """Runs a snippet that must succeed and be silent on standard error."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LLAMAFACTORY", "COV"))}
        done = subprocess.run(
            [self.python, *options, "-c", code], capture_output=True, text=True, env=env, cwd=cwd or self.folder
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def files(self) -> set[str]:
        found = (path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)
        return {str(path.relative_to(self.folder)) for path in found}


def build(hook: str, folder: Path, source: Path = ROOT) -> Path:
    code = f"import sys, hatchling.build as b; print(b.{hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=source)
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_editable", tmp_path_factory.mktemp("editable"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=["wheel", "editable_wheel"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp(request.param)).install(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def llamafactory_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds LLaMA-Factory and nothing else; its `cli` module needs only the standard library."""
    spec = util.find_spec("llamafactory")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("llamafactory_only")
    (folder / "llamafactory").symlink_to(Path(spec.origin).parent)
    return folder


def test_the_wheel_holds_the_package_the_two_startup_files_and_the_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        pth = archive.read("llamafactory_preflight.pth").decode()
        start = archive.read("llamafactory_preflight.start").decode()
    version = wheel.name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {
        "llamafactory_preflight",
        "llamafactory_preflight.pth",
        "llamafactory_preflight.start",
        f"llamafactory_preflight-{version}.dist-info",
        f"llamafactory_preflight-{version}.data",
    }
    share = f"llamafactory_preflight-{version}.data/data/share/llamafactory-preflight"
    for folder in ("presets", "deepspeed_configs"):
        in_tree = {str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*") if file.is_file()}
        assert {name for name in names if name.startswith(f"{share}/{folder}/")} == {f"{share}/{f}" for f in in_tree}
    assert pth == "import llamafactory_preflight._startup; llamafactory_preflight._startup.install()\n"
    assert start == "llamafactory_preflight._startup:install\n"


def test_versions_are_left_to_llamafactory(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    needed = {line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")}
    assert {line for line in needed if "extra ==" not in line} == {
        "llamafactory>=0.9.4",
        "nvidia-ml-py",
        "omegaconf",
        "pyyaml",
    }
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == {"qlora", "deepspeed", "flash-attn", "liger", "dev", "test"}
    assert "License-Expression: Apache-2.0" in lines


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("build_wheel", tmp_path, source=tmp_path / sdist.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {i.filename: i.CRC for i in first.infolist()} == {i.filename: i.CRC for i in second.infolist()}


def test_exactly_two_modules_are_loaded_at_start(plain: Environment, installed: Environment) -> None:
    modules = "import sys; print(*sys.modules)"
    assert set(installed.run(modules).split()) - set(plain.run(modules).split()) == START_MODULES


def test_nothing_is_read_at_start_but_the_startup_files(plain: Environment, installed: Environment) -> None:
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import site
site.main()
print(*sorted(set(opened)), sep="\\n")
"""
    opened = [Path(line) for line in installed.run(code, "-S").splitlines()]
    assert any(path.name == "llamafactory_preflight.pth" for path in opened)
    ours = {path.name.split(".")[0] for path in opened if "llamafactory_preflight" in path.parts}
    assert ours == {"__init__", "_startup"}
    others = {path.name for path in opened if "llamafactory_preflight" not in path.parts and path.suffix != ".pth"}
    assert others == {Path(line).name for line in plain.run(code, "-S").splitlines()} - {"inert.pth"}


def test_a_start_leaves_environment_and_output_alone(plain: Environment, installed: Environment) -> None:
    code = "import os, sys; print({k: v for k, v in os.environ.items() if k != '__PYVENV_LAUNCHER__'}, len(sys.path))"
    added = 1 if "editable" in installed.folder.name else 0
    names, count = installed.run(code, "-W", "error", "-X", "dev").rsplit(" ", 1)
    plain_names, plain_count = plain.run(code, "-W", "error", "-X", "dev", cwd=installed.folder).rsplit(" ", 1)
    assert (names, int(count)) == (plain_names, int(plain_count) + added)


def test_the_finder_is_first_and_single_when_the_startup_file_runs_twice(installed: Environment) -> None:
    code = f"""
import site, sys
import llamafactory_preflight._startup as startup
site.addsitedir({str(installed.site_packages)!r})
startup.install()
print({COUNT_FINDERS}, type(sys.meta_path[0]).__module__)
"""
    assert installed.run(code).split() == ["1", "llamafactory_preflight._startup"]


@pytest.mark.parametrize(("option", "count"), [("-S", "0"), ("-I", "1"), ("-E", "1"), ("-s", "1"), ("-O", "1")])
def test_interpreter_options(installed: Environment, option: str, count: str) -> None:
    assert installed.run(f"import sys; print({COUNT_FINDERS})", option).strip() == count


def test_without_llamafactory_an_import_of_it_fails_as_ever(plain: Environment, installed: Environment) -> None:
    code = """
for name in ("llamafactory", "llamafactory.cli"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error, error.name)
"""
    assert installed.run(code) == plain.run(code)


def test_the_command_line_is_hooked_without_heavy_imports(installed: Environment, llamafactory_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(llamafactory_path)!r})
from llamafactory.cli import main
from llamafactory_preflight import hooks
print(hooks.is_applied(main), "torch" in sys.modules)
"""
    assert installed.run(code).split() == ["True", "False"]


def test_the_pack_is_found(installed: Environment) -> None:
    code = "from llamafactory_preflight.arguments import paths; print(paths.pack_folder())"
    pack = Path(installed.run(code).strip())
    assert pack == (ROOT if "editable" in installed.folder.name else installed.folder / "share/llamafactory-preflight")
    assert (pack / "presets" / "cpu_smoke.yaml").is_file() and (pack / "deepspeed_configs").is_dir()


@pytest.mark.parametrize("kind", ["wheel", "editable_wheel"])
def test_uninstalling_leaves_nothing(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    before = environment.files()
    environment.install(request.getfixturevalue(kind))
    environment.run("import llamafactory_preflight")
    assert environment.files() > before
    environment.pip("uninstall", "--yes", "llamafactory-preflight")
    assert environment.files() == before
    assert environment.run(f"import sys; print({COUNT_FINDERS})").strip() == "0"
