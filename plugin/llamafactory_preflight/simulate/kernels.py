"""CUDA kernels whose scratch memory no fake kernel shows, and the functions that choose between kernels on a card.

A replacement allocates what the CUDA implementation allocates and returns tensors of the right shapes. Everything else
runs through PyTorch's own fake kernels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from llamafactory_preflight.simulate import values
from llamafactory_preflight.simulate.autocast import CudaAutocast


aten = torch.ops.aten


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention-2's `mha_bwd`: float32 dQ accumulator, row sums, and dK, dV of every query head under GQA."""
    batch, num_heads, length, head_dim = query.shape
    num_key_heads, key_length = key.shape[1], key.shape[2]
    grads = tuple(torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (query, key, value))
    rows = _round_up(length, 128)
    columns = _round_up(head_dim, 32) if head_dim <= 192 else 256
    scratch = [
        query.new_empty((batch, num_heads, rows), dtype=torch.float32),
        query.new_empty((batch, rows, num_heads, columns), dtype=torch.float32),
    ]
    if num_key_heads != num_heads:
        scratch += [key.new_empty((batch, key_length, num_heads, head_dim)) for _ in range(2)]
    del scratch
    return grads  # type: ignore[return-value]


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """`softmax_backward_cuda_out` first multiplies the gradient with the output."""
    product = torch.empty_like(grad)
    result = torch.empty_like(grad, dtype=input_dtype)
    del product
    return result


def addmm_to_float32(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Half-precision factors added to a float32 matrix in place; PyTorch's fake kernel fails on it."""
    return out


def gemm_4bit(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    shape: Any,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """As of 0.50, beyond a few hundred tokens: scales and weight are dequantized whole, then a plain matmul."""
    scales = None
    if absmax_8bit is not None:  # dequantized, and shifted by the offset into another tensor
        scales = [torch.empty_like(absmax_8bit, dtype=torch.float32) for _ in range(2)]
    product: torch.Tensor = aten.linear.default(inputs, inputs.new_empty(tuple(shape)), bias)
    del scales
    return product


def int8_vectorwise_quant(inputs: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Its third result are the columns with outliers, whose number depends on values: none here."""
    rows = inputs.new_empty(inputs.shape, dtype=torch.int8)
    maxima = inputs.new_empty((inputs.numel() // inputs.shape[-1],), dtype=torch.float32)
    if threshold <= 0.0:
        return rows, maxima, None
    inputs.abs().ge(threshold)
    return rows, maxima, inputs.new_empty((0,), dtype=torch.int64)


def int8_mixed_scaled_mm(
    inputs: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *scales: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """An int32 product, its float16 dequantization, and a copy in the wanted type; no outliers."""
    product = rows.new_empty((*rows.shape[:-1], weight.shape[0]), dtype=torch.int32)
    return torch.empty_like(product, dtype=torch.float16).to(inputs.dtype), inputs.new_empty((0,))


def sum_of_gradients(first: torch.Tensor, second: Any, **kwargs: Any) -> Any:
    """Autograd's sum of two gradients of one tensor: in place in the earlier one, if nobody else holds that.

    `can_accumulate_inplace` denies that to every tensor subclass, so fake tensors would sum into a third tensor. That
    is a whole vocabulary matrix where the embedding is tied to the head.
    """
    engine = sys._getframe(2).f_code.co_name == "_engine_run_backward"
    if not engine or torch.is_grad_enabled() or not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return NotImplemented
    return first.add_(second) if _held_by_engine_only(first) else NotImplemented


def _held_by_engine_only(tensor: torch.Tensor) -> bool:
    """One reference of the engine's, and three that the dispatch to Python itself takes."""
    # Not by way of a variable: a Python object of the storage would count as a second holder.
    holders = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count() <= 4 and holders == 1  # type: ignore[attr-defined]


def index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """Indexing by a mask, whose value must be known: it is turned into the numbers of its rows first."""
    return aten.index.Tensor(tensor, _numbers(indices)) if _has_mask(indices) else NotImplemented


def index_put(
    tensor: torch.Tensor, indices: list[torch.Tensor | None], source: torch.Tensor, *options: bool, **kwargs: Any
) -> Any:
    """As `index`, for the operator that writes."""
    if not _has_mask(indices):
        return NotImplemented
    return aten._index_put_impl_.default(tensor, _numbers(indices), source, *options, **kwargs)


def _has_mask(indices: list[torch.Tensor | None]) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in indices)


def _numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """`expandTensors`: a contiguous copy of a mask if need be, and a column of `nonzero` for each dimension."""
    numbers: list[torch.Tensor | None] = []
    for each in indices:
        if each is None or each.dtype != torch.bool:
            numbers.append(each)
            continue
        mask = each.contiguous()
        numbers += aten.nonzero.default(mask).unbind(1)
        del mask
    return numbers


def masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`masked_select_cuda` indexes by the mask."""
    selected: torch.Tensor = aten.index.Tensor(tensor, _numbers([mask]))
    return selected


def masked_scatter(tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A copy, and for the time of the kernel a contiguous mask and its running sum in 64 bit."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    scratch = (torch.empty(out.shape, dtype=torch.int64, device=out.device), mask.expand(out.shape).contiguous())
    del scratch
    return out


def replacements() -> Mapping[Any, Any]:
    """Operator to replacement, for the libraries that are installed."""
    table: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
        aten._softmax_backward_data.default: softmax_backward,
        aten.add.Tensor: sum_of_gradients,
        aten.index.Tensor: index,
        aten._index_put_impl_.default: index_put,
        aten.masked_select.default: masked_select,
        aten.masked_scatter.default: masked_scatter,
    }
    if hasattr(aten.addmm, "dtype_out"):
        table[aten.addmm.dtype_out] = addmm_to_float32
    for replacement in (gemm_4bit, int8_vectorwise_quant, int8_mixed_scaled_mm):
        operator = getattr(torch.ops.bitsandbytes, replacement.__name__, None)
        if operator is not None:
            table[operator.default] = replacement
    return table


def attention_on_cuda(autocast: CudaAutocast) -> Any:
    """Returns `scaled_dot_product_attention` as it picks a kernel on a card: flash unless there is a mask."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value, attn_mask = (autocast.cast(each, dtype) for each in (query, key, value, attn_mask))
        half = query.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half and query.shape[-1] <= 256:
            pad = -query.shape[-1] % 8
            if pad:
                query, key, value = (torch.nn.functional.pad(each, (0, pad)) for each in (query, key, value))
            scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1] - pad)
            flash = aten._scaled_dot_product_flash_attention
            out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., : out.shape[-1] - pad] if pad else out
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
        if attn_mask is not None:  # `pad_bias`: the kernel reads eight elements at once
            pad = -attn_mask.shape[-1] % 8
            if pad:
                attn_mask = torch.nn.functional.pad(attn_mask, (0, pad))[..., : attn_mask.shape[-1]]
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        attended: torch.Tensor = efficient(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return attended

    return attention


def _dropout_on_cuda(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """The fused kernel that CUDA tensors take: it keeps a mask of one byte an element."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, training)[0]


def _causal_mask_is_implied(original: Any, *, padded: bool) -> Any:
    """The rule by which transformers drops a mask, without its look at values: only padding makes it needed."""
    if padded:
        return lambda *args, **kwargs: False
    return lambda padding_mask, *args, **kwargs: original(None, *args, **kwargs)


@contextmanager
def cuda_kernels(autocast: CudaAutocast, *, padded: bool) -> Iterator[None]:
    """Puts the functions above in the place of those that look at a tensor's native device or at its values.

    Args:
        autocast: The simulation's autocast.
        padded: Whether batches hold padding.
    """
    from transformers import masking_utils

    ignore_mask = _causal_mask_is_implied(masking_utils._ignore_causal_mask_sdpa, padded=padded)
    with ExitStack() as stack:
        for target, name, value in (
            (torch.nn.functional, "scaled_dot_product_attention", attention_on_cuda(autocast)),
            (torch.nn.functional, "dropout", _dropout_on_cuda),
            (torch, "clear_autocast_cache", autocast.clear_cache),
            (masking_utils, "_ignore_causal_mask_sdpa", ignore_mask),
            (FakeTensor, "tolist", values.as_list),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
