"""Values of a few fake tensors: of image sizes and token ids, which decide how large other tensors are.

A tensor that is given a value carries it on, through every operator whose inputs all have one. Ranges in main memory
and tensors made of Python numbers have values from the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map


PLACES = ("device", "pin_memory", "non_blocking")  # arguments that mean nothing for a value in main memory


def give(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the fake tensor, whose value operators know from now on."""
    tensor.given = value  # type: ignore[attr-defined]
    return tensor


def given(tensor: Any) -> torch.Tensor | None:
    """The value of a tensor, if it is known."""
    return getattr(tensor, "given", None) if isinstance(tensor, FakeTensor) else tensor


def are_given(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all tensors that an operator takes have values, or it takes none and makes a range."""
    if func.namespace != "aten":
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return (
            func.overloadpacket is torch.ops.aten.arange and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        )
    return all(given(tensor) is not None for tensor in tensors)


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator on values."""
    args, kwargs = tree_map(lambda leaf: given(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs or {}))
    with no_dispatch():
        return func(*args, **{name: value for name, value in kwargs.items() if name not in PLACES})


def carried(known: Any, result: Any) -> Any:
    """Gives an operator's result, a tensor or several, the values that were computed for it."""
    for tensor, value in zip(tree_leaves(result), tree_leaves(known), strict=True):
        if isinstance(tensor, torch.Tensor):
            give(tensor, value)
    return result


def as_list(tensor: FakeTensor) -> Any:
    """In the place of `FakeTensor.tolist`, which reads a tensor element by element."""
    value = given(tensor)
    with no_dispatch():
        if value is None:
            value = torch.ones(1, dtype=tensor.dtype).expand(tensor.shape)
        return torch.Tensor.tolist(value)
