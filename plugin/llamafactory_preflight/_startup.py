"""What runs at every interpreter start: one finder that waits for LLaMA-Factory to be imported.

This module imports nothing that is not already loaded, prints nothing, and reads neither files nor the environment.
So it does without `from __future__ import annotations`, which would load a file in every process.
"""

import sys
from _thread import get_ident


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PREFIX = "llamafactory."


class _Finder:
    """Finds nothing itself: it takes what the other finders found and adds a step after the module's body."""

    def __init__(self) -> None:
        self._searching: set[tuple[str, int]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if not name.startswith(_PREFIX):
            return None
        search = (name, get_ident())
        if search in self._searching:  # another finder that asks around, as we do, has come back to us
            return None
        self._searching.add(search)
        try:
            spec = self._ask_others(name, path, target)
            if spec is not None and _has_patch_points(name):
                _apply_after_exec(spec)
            return spec
        finally:
            self._searching.discard(search)

    def _ask_others(self, name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def _has_patch_points(name: str) -> bool:
    try:
        from llamafactory_preflight import hooks
    except Exception as error:
        _give_up(error)
        return False
    return name in hooks.MODULES


def _apply_after_exec(spec: "ModuleSpec") -> None:
    loader = spec.loader
    original = getattr(loader, "exec_module", None)
    if original is None or isinstance(loader, type):  # a namespace package; a loader that serves every module
        return

    def exec_module(module: "ModuleType") -> None:
        vars(loader).pop("exec_module", None)  # from here on the loader is again the one that Python made
        original(module)
        try:
            from llamafactory_preflight import hooks

            hooks.apply(module)
        except Exception as error:
            _give_up(error)

    try:
        # On the instance: a loader of our own would hide get_code and get_data from runpy and inspect.
        vars(loader)["exec_module"] = exec_module
    except Exception as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    """Fails open: LLaMA-Factory works on without us. One warning, as the finder is gone after it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not _Finder]
    reason = f"{type(error).__name__}: {error}"
    try:
        print(f"llamafactory-preflight is not active in this process ({reason})", file=sys.stderr)
    except (OSError, ValueError):  # standard error is closed or full, which is no reason to stop either
        pass


def install() -> None:
    """Puts the finder first, as behind the standard finders it would never be asked. Safe to call twice."""
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
