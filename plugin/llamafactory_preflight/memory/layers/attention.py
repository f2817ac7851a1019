"""Attention kernels on paper: sizes per call are in elements of one batch of `tokens` = batch x sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BOOL, FLOAT16, FLOAT32
from llamafactory_preflight.memory.paper.ledger import Gradients, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops


FLASH_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One attention call: `batch` sequences of `length` tokens."""

    batch: int
    length: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def scores(self) -> int:
        """Elements of the score matrix that eager attention writes out."""
        return self.batch * self.num_heads * self.length * self.length

    @property
    def rows(self) -> int:
        """Rows of the softmax over all heads."""
        return self.batch * self.num_heads * self.length

    @property
    def query_size(self) -> int:
        """Elements of the queries, and of keys or values repeated for every query head."""
        return self.rows * self.head_dim

    @property
    def key_size(self) -> int:
        """Elements of the keys or the values."""
        return self.batch * self.num_key_value_heads * self.length * self.head_dim


def flash(ops: Ops, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """FlashAttention-2, in torch's scaled_dot_product_attention or the flash-attn package; grouped heads stay grouped.

    Saves q, k, v, the output and one float32 a row. The backward accumulates dq in float32 and makes dk and dv for
    every query head before it sums them to the grouped ones
    (torch/aten/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    q, k, v = ops.lower(q), ops.lower(k), ops.lower(v)
    out = ops.empty(q.numel, q.dtype)
    row_sums = ops.empty(call.rows, FLOAT32)
    size, key_size = q.nbytes, k.nbytes
    padded = -(-call.length // FLASH_BLOCK) * FLASH_BLOCK
    padded_rows = call.batch * call.num_heads * padded
    head_rounded = -(-call.head_dim // 32) * 32
    grouped = call.num_heads != call.num_key_value_heads

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        dq, dk, dv = (ops.storage(n) for n in (size, key_size, key_size))
        scratch = [Storage(ops.ledger, padded_rows * dtypes.size(FLOAT32), "activations")]
        scratch.append(Storage(ops.ledger, padded_rows * head_rounded * dtypes.size(FLOAT32), "activations"))
        if grouped:
            scratch += [ops.storage(size) for _ in range(2)]
        del scratch
        return (dq, dk, dv)

    return ops.link(out, (q, k, v), (q.storage, k.storage, v.storage, out.storage, row_sums.storage), backward)


def efficient(ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """The memory-efficient kernel, which torch takes for a mask: keys and values are repeated for it first."""
    k, v = (repeat(ops, x, call) for x in (k, v))
    mask = _as_bias(ops, mask, q)
    q, k, v = ops.lower(q), ops.lower(k), ops.lower(v)
    out = ops.empty(q.numel, q.dtype)
    row_sums = ops.empty(call.rows, FLOAT32)
    size = q.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        gradients = tuple(ops.storage(size) for _ in range(3))
        scratch = Storage(ops.ledger, call.rows * dtypes.size(FLOAT32), "activations")
        del scratch
        return gradients

    saved = (q.storage, k.storage, v.storage, mask.storage, out.storage, row_sums.storage)
    return ops.link(out, (q, k, v), saved, backward)


def _as_bias(ops: Ops, mask: Tensor, q: Tensor) -> Tensor:
    """A boolean mask becomes a bias in the queries' type."""
    return ops.empty(mask.numel, ops.lower_dtype(q.dtype)) if mask.dtype == BOOL else mask


def eager(ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """Transformers' eager_attention_forward: the score matrix is written out four times."""
    k, v = repeat(ops, k, call), repeat(ops, v, call)
    scores = matmul(ops, q, k, call.scores)
    scores = ops.scale(scores)
    scores = _masked(ops, scores, mask)
    probabilities = softmax(ops, scores)
    probabilities = ops.cast(probabilities, q.dtype if ops.autocast_dtype is None else ops.autocast_dtype)
    return matmul(ops, probabilities, v, call.query_size)


def _masked(ops: Ops, scores: Tensor, mask: Tensor) -> Tensor:
    """Scores + mask, in the type that both promote to."""
    out = ops.empty(scores.numel, dtypes.promote(scores.dtype, mask.dtype))
    size, same = scores.nbytes, out.dtype == scores.dtype
    return ops.link(out, (scores,), (), lambda grad, saved: (grad if same else ops.storage(size),))


def repeat(ops: Ops, x: Tensor, call: AttentionCall) -> Tensor:
    """repeat_kv: a copy for every query head; its gradient is summed over the group."""
    if call.num_heads == call.num_key_value_heads:
        return x
    single = call.num_key_value_heads == 1  # then its expansion is a view
    out = Tensor(call.query_size, x.dtype, x.storage) if single else ops.empty(call.query_size, x.dtype)
    size = x.nbytes
    return ops.link(out, (x,), (), lambda grad, saved: (ops.storage(size),))


def rotate(ops: Ops, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb: x * cos + rotate_half(x) * sin."""
    direct = ops.mul_constant(x, cos)
    negated = ops.empty(x.numel // 2, x.dtype)
    half = ops.empty(x.numel, x.dtype)
    del negated
    size = x.nbytes
    half = ops.link(half, (x,), (), lambda grad, saved: (ops.storage(size),))
    turned = ops.mul_constant(half, sin)
    del half
    return ops.add(direct, turned)


def split(ops: Ops, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """torch.split or unbind into views of these relative sizes: their gradients wait for each other and are joined."""
    whole, unit = x.nbytes, x.numel // sum(sizes)
    arrived: list[Storage] = []

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        arrived.append(grad)
        if len(arrived) < len(sizes):
            return (None,)
        joined = ops.storage(whole)
        arrived.clear()
        return (joined,)

    return [ops.link(Tensor(unit * size, x.dtype, x.storage), (x,), (), backward) for size in sizes]


def join(ops: Ops, parts: Sequence[Tensor]) -> Tensor:
    """torch.cat: the gradients are views of the whole one."""
    out = ops.empty(sum(part.numel for part in parts), parts[0].dtype)
    return ops.link(out, tuple(parts), (), lambda grad, saved: (grad,) * len(parts))


def matmul(ops: Ops, a: Tensor, b: Tensor, numel: int) -> Tensor:
    """torch.matmul of two activations."""
    a, b = ops.lower(a), ops.lower(b)
    out = ops.empty(numel, a.dtype)
    sizes = a.nbytes, b.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return tuple(ops.storage(size) for size in sizes)

    return ops.link(out, (a, b), (b.storage, a.storage), backward)


def softmax(ops: Ops, x: Tensor) -> Tensor:
    """F.softmax(dtype=float32): saves its output; only for float16 is the cast part of the kernel.

    The backward first writes out gradient times output (aten/native/cuda/SoftMax.cu).
    """
    x = x if x.dtype == FLOAT16 else ops.cast(x, FLOAT32)
    out = ops.empty(x.numel, FLOAT32)
    size, wide = x.nbytes, out.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        dx = ops.storage(size)
        product = ops.storage(wide)
        del product
        return (dx,)

    return ops.link(out, (x,), (out.storage,), backward)
