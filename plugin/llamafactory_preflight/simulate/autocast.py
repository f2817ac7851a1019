"""CUDA autocast for fake tensors.

PyTorch's own looks at the native device of a tensor, which here is not `cuda` (see `card`), and leaves it alone. The
policy is the documented one: https://docs.pytorch.org/docs/stable/amp.html, sections on CUDA operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from llamafactory_preflight.simulate.card import spelled_out


_T = torch.Tensor


def _named(names: str) -> set[Any]:
    """The functions of these names in `torch` and `torch.Tensor`."""
    return {getattr(owner, name) for owner in (torch, _T) for name in names.split() if hasattr(owner, name)}


LOWER_PRECISION = frozenset(
    {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.prelu}
    | {torch.linalg.multi_dot, _T.__matmul__, _T.__rmatmul__}
    | _named("matmul mm mv bmm addmm addmv addbmm baddbmm einsum chain_matmul conv1d conv2d conv3d")
)
FLOAT32 = frozenset(
    {F.softmax, F.log_softmax, F.layer_norm, F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss}
    | {F.smooth_l1_loss, F.kl_div, F.cosine_similarity, F.softplus, F.cosine_embedding_loss, F.huber_loss, F.normalize}
    | {_T.__pow__, _T.__rpow__}
    | _named("pow rsqrt exp expm1 log log10 log2 log1p reciprocal cosh sinh tan acos asin erfinv")
    | _named("cumsum cumprod sum prod softmax log_softmax logsumexp norm dist cdist renorm")
)
WIDEST = frozenset(_named("cat stack dot vdot cross addcdiv addcmul atan2 tensordot bilinear index_put scatter_add"))
NOT_CAST = {"out", "out_dtype"}  # overloads that have no autocast kernel
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)


class CudaAutocast(TorchFunctionMode):
    """Casts arguments as autocast does wherever `torch.autocast("cuda")` is on, with its cache of cast weights.

    The cache holds a half-precision copy of every float32 leaf that requires gradients, from its first use until the
    outermost autocast context is left: a second copy of the weights in full tuning with float32 masters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _T.to and len(args) > 1:
            args, kwargs = spelled_out(args, kwargs)
        if func is F.softmax and _is_fused_softmax(*args, **kwargs):
            return torch._softmax(args[0], kwargs["dim"] if "dim" in kwargs else args[1], True)
        if torch.is_autocast_enabled("cuda") and not kwargs.keys() & NOT_CAST:
            if func in LOWER_PRECISION:
                args, kwargs = self._cast(args, kwargs, torch.get_autocast_dtype("cuda"))
            elif func in FLOAT32 and kwargs.get("dtype") is None:
                args, kwargs = self._cast(args, kwargs, torch.float32)
            elif func in WIDEST:
                widest = torch.float32 if torch.float32 in _dtypes(args, kwargs) else torch.get_autocast_dtype("cuda")
                args, kwargs = self._cast(args, kwargs, widest)
        return func(*args, **kwargs)

    def _cast(self, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda leaf: self.cast(leaf, dtype), (args, kwargs))

    def cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        """Returns `leaf` in `dtype` if it is a floating tensor on the card, from the cache if it is a weight."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cuda":
            return leaf
        if leaf.dtype == dtype or leaf.dtype not in _FLOATS:
            return leaf
        is_weight = leaf.dtype == torch.float32 and leaf.requires_grad and leaf.is_leaf and not leaf._is_view()
        if dtype not in _HALVES or not is_weight or not torch.is_autocast_cache_enabled():
            return leaf.to(dtype)
        cached = self._cache.get(id(leaf))
        if cached is None:
            cached = self._cache[id(leaf)] = (leaf, leaf.to(dtype))
        return cached[1]

    def clear_cache(self) -> None:
        """Stands in for `torch.clear_autocast_cache`, which PyTorch calls when the outermost context is left."""
        self._cache.clear()


def _is_fused_softmax(
    tensor: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> bool:
    """From float16 to float32 the CUDA kernel needs no copy (`half_to_float`); bfloat16 is converted first."""
    if dtype is None and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    return dim is not None and (tensor.device.type, tensor.dtype, dtype) == ("cuda", torch.float16, torch.float32)


def _dtypes(*trees: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)}
