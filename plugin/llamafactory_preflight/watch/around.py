"""Wrappers for the hooks of the watch. Nothing is imported here until a training starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llamafactory_preflight.failing import fail_open


if TYPE_CHECKING:
    from llamafactory_preflight.data.lengths import Longest
    from llamafactory_preflight.watch.training import Training

_current: list[Training | None] = [None]


def training_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watches memory in the process that trains, and adds an answer to the exception where it runs out."""

    @functools.wraps(original)
    def watched(config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        training = fail_open(functools.partial(_begin, config), None)
        _current[:] = [training]
        try:
            result = original(config, *args, **kwargs)
        except BaseException as error:
            if training is not None:
                fail_open(functools.partial(training.fail, error), None)
            raise
        finally:
            _current[:] = [None]
        if training is not None:
            fail_open(training.finish, None)
        return result

    return watched


def data_is_read(longest: Longest | None) -> None:
    """The data is tokenized; the weights come next."""
    if _current[0] is not None:
        _current[0].data_is_read(longest)


def kills_so_far() -> dict[str, int]:
    """How often the kernel has killed before the children start."""
    from llamafactory_preflight.watch import kills

    return kills.counted()


def answer_for_children(error: Exception, given: list[str], kills_before: dict[str, int]) -> None:
    """All that torchrun says is that a child failed: adds what the child said, or what it could not say."""
    if type(error).__name__ != "CalledProcessError":
        return
    from llamafactory_preflight import arguments
    from llamafactory_preflight.watch import aftermath

    output_dir = arguments.read(given).get("output_dir")
    for text in aftermath.of_children(str(output_dir or ""), kills_before):
        error.add_note(f"\n{text}")


def _begin(config: dict[str, Any]) -> Training:
    from llamafactory_preflight import arguments
    from llamafactory_preflight.watch.training import Training

    given = config["args"]
    training = Training(given if isinstance(given, dict) else arguments.read(given), config["callbacks"])
    training.begin()
    return training
