"""Language-model heads and losses on paper: where a vocabulary-sized tensor is written out, and how many at once."""

from __future__ import annotations

from llamafactory_preflight.memory.ops import FLOAT32, Ops, Weight
from llamafactory_preflight.memory.paper import Gradients, Storage, Tensor


def cross_entropy(ops: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    """transformers' ForCausalLMLoss: logits to float32, log_softmax saved, its backward holds three such tensors at once."""
    high = ops.cast(logits, FLOAT32, "logits")
    log_probabilities = _log_softmax(ops, high)
    return _nll(ops, log_probabilities, vocab_size)


def _log_softmax(ops: Ops, x: Tensor) -> Tensor:
    out = ops.empty(x.numel, FLOAT32, "logits")
    size = x.numel * FLOAT32

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return (Storage(ops.ledger, size, "logits"),)

    return ops.link(out, (x,), (out.storage,), backward)


def _nll(ops: Ops, x: Tensor, vocab_size: int) -> Tensor:
    out = ops.empty(1, FLOAT32)
    size = x.numel * FLOAT32

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return (Storage(ops.ledger, size, "logits"),)

    return ops.link(out, (x,), (x.storage,), backward)


def liger_chunk(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Rows of logits that liger's fused loss holds at once: about as many bytes as the hidden states have."""
    factor = -(-vocab_size // hidden_size)
    return min(tokens, 1 << (-(-tokens // factor) - 1).bit_length())


def liger_linear_cross_entropy(ops: Ops, hidden: Tensor, head: Weight) -> Tensor:
    """liger_kernel.ops.fused_linear_cross_entropy: both gradients are made in the forward, one chunk of logits at a time."""
    tokens = hidden.numel // head.width
    vocab_size = head.numel // head.width
    chunk = liger_chunk(tokens, head.width, vocab_size)
    low = ops.autocast_itemsize if ops.autocast_cache is not None else None
    grad_input = ops.empty(hidden.numel, hidden.itemsize)
    grad_weight = ops.empty(head.numel, head.itemsize, "gradients") if head.node is not None else None
    itemsize = low or hidden.itemsize
    logits = ops.empty(chunk * vocab_size, itemsize, "logits")
    if itemsize != head.itemsize:  # weight.t() is no leaf, so autocast casts it anew for every product
        cast = ops.empty(head.numel, itemsize, "buffers")
        del cast
    del logits
    out = ops.empty(1, FLOAT32)
    saved = tuple(x.storage for x in (grad_input, grad_weight) if x is not None)
    trained = grad_weight is not None
    del grad_input, grad_weight

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return saved if trained else (saved[0], None)

    return ops.link(out, (hidden, head), saved, backward)
