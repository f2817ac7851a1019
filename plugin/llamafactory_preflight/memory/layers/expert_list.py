"""A sparse layer on paper, as transformers 4 runs it: a loop over a list of MLPs, each with the tokens sent to it.

Source: Qwen3MoeSparseMoeBlock.forward of transformers/models/qwen3_moe/modeling_qwen3_moe.py (4.55 to 4.57). The
first expert and the last two are run, those between are booked. The backward of the last two runs first, while all
others still hold what they saved; the second of it adds to the gradient of the hidden states that the first one made.
Known error: all experts get equally many tokens. How they are spread leaves alone what is saved; an expert that got
every token would add 0.6 % to the peak of Qwen3-30B-A3B in 4 bit at 8,192 tokens, and nothing at 2,048.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.layers.adapters import Linear
from llamafactory_preflight.memory.layers.attention import softmax
from llamafactory_preflight.memory.layers.mlp import gated_mlp
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32, INT64
from llamafactory_preflight.memory.paper.growth import Growth, Shelf
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops


NUM_RUN = 3
INDEX_COLUMNS = 2
"""What torch.where returns for a token of an expert: its row, and which of its choices the expert is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertList:
    """The MLP of a sparse layer.

    Attributes:
        router: Scores the experts of every token.
        mlps: Those experts that are run, each with weights of its own.
        num_experts: How many there are.
        per_token: Experts that a token is sent to.
        liger: Whether the experts are liger's.
        others: Keeps the gradients of the experts that are not run.
    """

    router: Linear
    mlps: Sequence[Mapping[str, Linear]]
    num_experts: int
    per_token: int
    liger: bool
    others: Leaf

    def __call__(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Routes every token, equally many to each expert, and adds up what the experts return."""
        width = self.router.weight.width
        logits = self.router(ops, hidden)  # returned beside the output, so it lives as long as the call
        scores, choices = self._choose(ops, logits, hidden.dtype)
        out = ops.empty(hidden.numel, hidden.dtype)
        one_hot = ops.empty(choices.numel * self.num_experts, INT64)
        number = min(self.num_experts, choices.numel)
        rows = -(-choices.numel // number)
        # Without a backward no position matters, and one expert behind the first shows what an expert leaves.
        mlps = self.mlps[: number if ops.grad_enabled else 2]
        others, shelf = number - len(mlps), Shelf(ops.ledger)
        for index, mlp in enumerate(mlps):
            growth = Growth(ops)
            chosen = self._find(ops, choices, rows)
            state = self._index(ops, hidden, chosen, rows * width)
            result = self._weigh(ops, gated_mlp(ops, mlp, state, liger=self.liger), scores, chosen)
            result = ops.cast(result, hidden.dtype)
            out = self._add(ops, out, result, chosen)
            if index == 0:
                out = self._make_room(ops, out, shelf, others)
            elif index == 1:
                shelf.held = growth.book(others)
        del logits, one_hot
        return out

    def _choose(self, ops: Ops, logits: Tensor, dtype: int) -> tuple[Tensor, Tensor]:
        """torch.topk of the probabilities, divided in place by their sum, for which autograd keeps a copy of them."""
        probabilities = softmax(ops, logits)
        tokens, size = logits.numel // self.num_experts, probabilities.nbytes
        scores = ops.empty(tokens * self.per_token, FLOAT32)
        choices = ops.empty(scores.numel, INT64)
        kept = ops.storage(scores.nbytes), ops.storage(tokens * dtypes.size(FLOAT32))
        saved = (choices.storage, *kept)
        scores = ops.link(scores, (probabilities,), saved, lambda grad, saved: (ops.storage(size),))
        return ops.cast(scores, dtype), choices

    def _find(self, ops: Ops, choices: Tensor, rows: int) -> Tensor:
        """torch.where on an expert's part of the one-hot choices, which indexing copies."""
        part = ops.empty(choices.numel, INT64)
        found = ops.empty(INDEX_COLUMNS * rows, INT64)
        del part
        return found

    def _index(self, ops: Ops, x: Tensor, index: Tensor, numel: int) -> Tensor:
        """x[None, index]: the gradient is a view of a whole tensor of zeros with the rows put in."""
        out = ops.empty(numel, x.dtype)
        size = x.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (Storage(ops.ledger, size, "activations", viewed=True),)

        return ops.link(out, (x,), (index.storage,), backward)

    def _weigh(self, ops: Ops, x: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        """X * scores[index], one score a row: both gradients are whole tensors, one of them then summed."""
        rows = index.numel // INDEX_COLUMNS
        weights = self._index(ops, scores, index, rows)
        out = ops.empty(x.numel, dtypes.promote(x.dtype, weights.dtype))
        wide, size, column = out.nbytes, x.nbytes, weights.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            product = ops.storage(wide)
            dx = ops.product_gradient((wide, size))
            to_weights = ops.storage(column)
            del product
            return (dx, to_weights)

        return ops.link(out, (x, weights), (x.storage, weights.storage), backward)

    def _add(self, ops: Ops, out: Tensor, x: Tensor, index: Tensor) -> Tensor:
        """Tensor.index_add_, which saves what it adds; its gradient passes on, and those rows of it are copied."""
        size = x.nbytes

        def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            return (grad, ops.storage(size))

        return ops.link(out.detach(), (out, x), (index.storage, x.storage), backward)

    def _make_room(self, ops: Ops, out: Tensor, shelf: Shelf, number: int) -> Tensor:
        """`number` experts behind the first: they free what is put on the shelf and make their gradients."""
        size = number * sum(ops.ledger.block(w.nbytes) for linear in self.mlps[0].values() for w in linear.trained())

        def make_gradients(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
            if self.others.grad is None:
                self.others.grad = ops.storage(size, "gradients")
            return (grad,)

        out = ops.link(out.detach(), (out,), (), make_gradients)
        return ops.link(out.detach(), (out,), (shelf,), lambda grad, saved: (grad,))
