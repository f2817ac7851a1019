"""A sparse layer on paper, as transformers 5 and liger run it: stacked weights, token-expert pairs as rows.

Source: transformers/integrations/moe.py (grouped_mm_experts_forward), liger_kernel/ops/fused_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamafactory_preflight.memory.layers.attention import softmax
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32, INT64
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Gradients, Storage, Tensor
from llamafactory_preflight.memory.paper.module_hooks import EXPERTS
from llamafactory_preflight.memory.paper.ops import Ops


INDEX_TENSORS = 6
"""Permutations, expert ids and offsets of every token-expert pair, 64 bit each."""


TUNING_BYTES = 256 * 2**20
"""What Triton's do_bench clears between runs to empty the card's cache (triton/testing.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The MLP of a sparse layer."""

    router: Weight
    gate_up: Weight
    down: Weight
    num_experts: int
    per_token: int
    intermediate_size: int
    liger: bool
    tunes: bool
    """It is the first step, in which Triton tries configurations of liger's kernels."""

    def __call__(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Routes every token to its experts and sums what they return; a single module to DeepSpeed's hooks."""
        return ops.module(hidden, self.gate_up, lambda x: self._route(ops, x), name=EXPERTS)

    def _route(self, ops: Ops, hidden: Tensor) -> Tensor:
        tokens = hidden.numel // self.router.width
        logits = ops.linear(hidden, self.router)
        probabilities = softmax(ops, logits)
        scores = self._chosen(ops, probabilities, tokens)
        del probabilities
        run = self._liger if self.liger else self._grouped
        return run(ops, hidden, scores, tokens)

    def _chosen(self, ops: Ops, probabilities: Tensor, tokens: int) -> Tensor:
        """torch.topk and the division by the sum."""
        out = ops.empty(tokens * self.per_token, FLOAT32)
        size = probabilities.nbytes
        return ops.link(out, (probabilities,), (), lambda grad, saved: (ops.storage(size),))

    def _grouped(self, ops: Ops, hidden: Tensor, scores: Tensor, tokens: int) -> Tensor:
        """Torch's grouped_mm over rows sorted by expert."""
        indices = ops.empty(INDEX_TENSORS * scores.numel, INT64)
        selected = self._gather(ops, hidden, scores.numel * self.router.width)
        gate_up = self._product(ops, selected, self.gate_up, 2 * self.intermediate_size)
        half = self._half(ops, gate_up)
        gated = ops.mul(ops.unary(half), self._half(ops, gate_up))
        del half
        product = self._product(ops, gated, self.down, self.router.width)
        weighted = self._weighted(ops, product, scores)
        weighted = self._gather(ops, weighted, weighted.numel)
        summed = self._summed(ops, weighted, tokens * self.router.width)
        del indices
        return ops.cast(summed, hidden.dtype)

    def _gather(self, ops: Ops, x: Tensor, numel: int) -> Tensor:
        """x[index]: the gradient is scattered into zeros."""
        out = ops.empty(numel, x.dtype)
        size = x.nbytes
        return ops.link(out, (x,), (), lambda grad, saved: (ops.storage(size),))

    def _product(self, ops: Ops, x: Tensor, weight: Weight, width: int) -> Tensor:
        rows = x.numel // weight.width
        out = ops.empty(rows * width, weight.dtype)
        trained = weight.node is not None
        saved = ((x.storage,) if trained else ()) + (ops.view(weight),)  # a transposed view of it
        size, dw = x.nbytes, weight.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            dx = ops.storage(size)
            return (dx, ops.storage(dw, "gradients") if trained else None)

        return ops.link(out, (x, weight), saved, backward)

    def _half(self, ops: Ops, x: Tensor) -> Tensor:
        """One of x.chunk(2): a view; its gradient is a full tensor with zeros in the other half."""
        size = x.nbytes
        out = Tensor(x.numel // 2, x.dtype, x.storage)
        return ops.link(out, (x,), (), lambda grad, saved: (ops.storage(size),))

    def _weighted(self, ops: Ops, x: Tensor, scores: Tensor) -> Tensor:
        """X * scores, one score a row, both with a gradient."""
        out = ops.empty(x.numel, x.dtype)
        size, scores_size = x.nbytes, scores.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            dx = ops.storage(size)
            product = ops.storage(size)
            del product
            return (dx, ops.storage(scores_size))

        return ops.link(out, (x, scores), (x.storage, scores.storage), backward)

    def _summed(self, ops: Ops, x: Tensor, numel: int) -> Tensor:
        """view(tokens, per_token, hidden).sum(1): float32 under autocast; the gradient is a view spread out."""
        dtype = FLOAT32 if ops.autocast_cache is not None else x.dtype
        out = ops.empty(numel, dtype)
        size = numel * dtypes.size(x.dtype)
        same = dtype == x.dtype

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (grad if same else ops.storage(size),)

        return ops.link(out, (x,), (), backward)

    def _liger(self, ops: Ops, hidden: Tensor, scores: Tensor, tokens: int) -> Tensor:
        """Gather, both products and the gate fused; the backward makes the experts' gradients even if frozen."""
        rows, width = scores.numel, self.router.width
        pre = ops.empty(rows * 2 * self.intermediate_size, hidden.dtype)
        post = ops.empty(rows * self.intermediate_size, hidden.dtype)
        product = ops.empty(rows * width, hidden.dtype)
        out = ops.empty(tokens * width, hidden.dtype)
        del post, product
        item = dtypes.size(hidden.dtype)
        sizes = (
            rows * 2 * self.intermediate_size * item, rows * self.intermediate_size * item, self.down.nbytes,
            rows * width * item, tokens * width * item, self.gate_up.nbytes,
        )  # fmt: skip
        trained, scores_size, tunes = self.gate_up.node is not None, scores.nbytes, self.tunes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            owners = ("activations", "activations", "buffers", "activations", "activations", "buffers")
            tuning = ops.storage(TUNING_BYTES if tunes else 0, "buffers")
            made = [Storage(ops.ledger, size, owner) for size, owner in zip(sizes, owners, strict=True)]
            to_scores = ops.storage(scores_size)
            del tuning
            experts = (made[5], made[2]) if trained else (None, None)
            return (made[4], *experts, to_scores)

        inputs = (hidden, self.gate_up, self.down, scores)
        return ops.link(out, inputs, (hidden.storage, pre.storage, scores.storage), backward)
