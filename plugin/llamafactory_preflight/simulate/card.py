"""A CUDA card that exists on paper: tensors with shapes, types and the device `cuda`, but no driver and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_map

from llamafactory_preflight.simulate import values


CARD = torch.device("cuda:0")
_META = torch.device("meta")
MULTIPROCESSORS = 132  # an H100's; only Liger's RMSNorm has a scratch row for each, a few hundred kilobytes in all
_EMPTY = torch.ops.aten.empty.memory_format
_aten = torch.ops.aten
_VIEWS = {_aten.select.int, _aten.slice.Tensor, _aten.transpose.int, _aten.view.default, _aten.expand.default}
_ONE = {True: 1.0, False: 1}
_make_subclass = torch.Tensor._make_subclass


def _without_native_device(cls: Any, data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:
    kwargs.pop("dispatch_device", None)
    return _make_subclass(cls, data, requires_grad, **kwargs)


class CardMode(FakeTensorMode):
    """Fake tensors on `cuda` whose backward pass needs no CUDA driver.

    Autograd asks the device of every tensor for a stream. Where there is no driver, a build with CUDA aborts at that
    question and one without it raises. So the native side is told `meta`, and Python code, which is what decides what
    gets allocated, reads `cuda`. Two things follow. Autograd's own factory calls ask for `meta` and mean the card; and
    `.to("cuda")` of a tensor that is there already reaches us, where PyTorch would have returned the tensor itself.

    A value that is read back, such as a count of labels, is 1, unless it follows from tensors whose values were given
    (`values.with_value`); no two tensors are equal.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._patch: Any = None

    def __enter__(self) -> Any:
        self._patch = mock.patch.object(torch.Tensor, "_make_subclass", staticmethod(_without_native_device))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()

    def __deepcopy__(self, memo: Any) -> CardMode:
        return self  # PEFT copies modules, whose fake tensors point here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = values.computed(func, args, kwargs) if values.are_given(func, args, kwargs or {}) else None
        if func is torch.ops.aten._local_scalar_dense.default:
            return _ONE[args[0].dtype.is_floating_point] if known is None else known
        if func is torch.ops.aten.equal.default:
            return False
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device == _META:
            kwargs["device"] = CARD
        if func is torch.ops.aten._to_copy.default and device is not None and _is_already(args[0], kwargs):
            func, kwargs = torch.ops.aten.alias.default, {}
        result: Any
        try:
            if func in _VIEWS and type(args[0]) is FakeTensor and args[0].constant is None:
                result = self._view(func, args, kwargs)
            else:
                result = super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            if known is None:
                raise
            result = tree_map(self._empty, known)
        return result if known is None else values.carried(known, result)

    def _view(self, func: Any, args: Any, kwargs: Any) -> FakeTensor:
        """Computes a view without PyTorch's cache, which takes slices at different offsets for different calls."""
        with in_kernel_invocation_manager(self):
            view = func(*args, **kwargs)
        return FakeTensor(self, view, args[0].fake_device)

    def _empty(self, value: torch.Tensor) -> Any:
        """A fake tensor as large as a value turned out to be."""
        options = {"dtype": value.dtype, "device": CARD}
        return super().__torch_dispatch__(_EMPTY, (), (list(value.shape),), options)


def spelled_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `Tensor.to` in a form that leaves PyTorch no question about the native device."""
    tensor, target, *rest = args
    if isinstance(target, torch.Tensor):
        return (tensor, target.device, target.dtype, *rest), kwargs
    if target in ("cuda", torch.device("cuda")):
        return (tensor, CARD, *rest), kwargs
    return args, kwargs


def _is_already(tensor: torch.Tensor, wanted: dict[str, Any]) -> bool:
    device = torch.device(wanted["device"])
    same_device = tensor.device.type == device.type and device.index in (None, tensor.device.index)
    return same_device and wanted.get("dtype") in (None, tensor.dtype)


@contextmanager
def cuda_properties(capability: tuple[int, int]) -> Iterator[None]:
    """Answers the questions that libraries ask the driver."""
    properties = mock.Mock(multi_processor_count=MULTIPROCESSORS, major=capability[0], minor=capability[1])
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
    ):
        yield
