"""No change of the code that renders goes unnoticed by the caches of tokenized data."""

from __future__ import annotations

import shutil
from pathlib import Path

from llamafactory_preflight.fixer import rules


PACKAGE = Path(rules.__file__).resolve().parents[1]
FOLDERS = ("fixer", "templates")


def copied(target: Path) -> list[Path]:
    return [shutil.copytree(PACKAGE / name, target / name) for name in FOLDERS]


def test_the_hash_does_not_depend_on_the_place(tmp_path: Path) -> None:
    here = rules.digest([PACKAGE / name for name in FOLDERS], ["1"])
    assert here == rules.digest(copied(tmp_path), ["1"])


def test_any_changed_file_changes_the_hash(tmp_path: Path) -> None:
    folders = copied(tmp_path)
    seen = {rules.digest(folders, ["1"]), rules.digest(folders, ["2"]), rules.digest(folders, [None])}
    files = [file for folder in folders for file in folder.rglob("*.py")]
    for file in files:
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        seen.add(rules.digest(folders, ["1"]))
        file.write_bytes(before)
    files[0].rename(files[0].with_name("renamed.py"))
    seen.add(rules.digest(folders, ["1"]))
    assert len(files) > 15 and len(seen) == 3 + len(files) + 1


def test_the_installed_code_is_found() -> None:
    for package in rules.PACKAGES:
        (folder,) = rules._folders(package)
        assert len(list(folder.rglob("*.py"))) > 5, package


def test_what_is_hashed_by_datasets_holds_it() -> None:
    from datasets.fingerprint import Hasher

    from llamafactory_preflight.fixer.convert import RepairingConverter

    one, same, other = (RepairingConverter(inner=None, formatting="openai", rules=text) for text in "aab")
    assert Hasher.hash(one) == Hasher.hash(same) != Hasher.hash(other)
    assert RepairingConverter(inner=None, formatting="openai").rules == rules.rules()
