"""Language-model heads and losses on paper: where a vocabulary-sized tensor is written out, and how many at once."""

from __future__ import annotations

from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Gradients, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops


def cross_entropy(ops: Ops, logits: Tensor) -> Tensor:
    """Transformers' ForCausalLMLoss: float32 logits, log_softmax saved; its backward holds three such tensors."""
    high = ops.cast(logits, FLOAT32, "logits")
    return _pick(ops, log_softmax(ops, high))


def masked_cross_entropy(ops: Ops, logits: Tensor) -> Tensor:
    """Gemma3ForConditionalGeneration's loss, on float32 logits: it copies those that are not padding."""
    shifted = without_last_token(ops, logits)
    size = shifted.nbytes
    chosen = ops.empty(shifted.numel, FLOAT32, "logits")
    chosen = ops.link(chosen, (shifted,), (), lambda grad, saved: (ops.storage(size, "logits"),))
    return _pick(ops, log_softmax(ops, chosen))


def log_softmax(ops: Ops, x: Tensor, *, contiguous: bool = True) -> Tensor:
    """torch.log_softmax: saves its output; an input that is no whole tensor is copied first."""
    copy = None if contiguous else ops.empty(x.numel, x.dtype, "logits")
    out = ops.empty(x.numel, x.dtype, "logits")
    del copy
    size = x.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return (ops.storage(size, "logits"),)

    return ops.link(out, (x,), (out.storage,), backward)


def _pick(ops: Ops, x: Tensor) -> Tensor:
    """nll_loss or gather: a number a row; the gradient is a tensor of zeros with one entry a row."""
    out = ops.empty(1, FLOAT32)
    size = x.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return (ops.storage(size, "logits"),)

    return ops.link(out, (x,), (x.storage,), backward)


def without_last_token(ops: Ops, x: Tensor) -> Tensor:
    """logits[:, :-1]: a view; its gradient is a full tensor again."""
    size = x.nbytes
    return ops.link(x.detach(), (x,), (), lambda grad, saved: (ops.storage(size, "logits"),))


def smoothed_cross_entropy(ops: Ops, logits: Tensor, *, whole: bool) -> Tensor:
    """Transformers' LabelSmoother: all log-probabilities are negated, one of each row is taken, and all are summed.

    Without the last token a single sequence is `whole` still; of several the rest is copied together.
    """
    x = without_last_token(ops, logits)
    if not whole:
        x = ops.link(ops.empty(x.numel, x.dtype, "logits"), (x,), (), lambda grad, saved: (grad,))
    probabilities = log_softmax(ops, x)
    size = probabilities.nbytes
    negated = ops.empty(probabilities.numel, probabilities.dtype, "logits")
    negated = ops.link(negated, (probabilities,), (), lambda grad, saved: (ops.storage(size, "logits"),))

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        """The sum's gradient is a view spread out, to which nothing is added in place."""
        taken = ops.storage(size, "logits")
        both = ops.storage(size, "logits")
        del taken
        return (both,)

    return ops.link(ops.empty(1, FLOAT32), (negated,), (), backward)


def batch_log_probabilities(ops: Ops, logits: Tensor, *, whole: bool) -> Tensor:
    """LLaMA-Factory's get_batch_logps, on float32 logits; `whole` as above."""
    return _pick(ops, log_softmax(ops, without_last_token(ops, logits), contiguous=whole))


def liger_chunk(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Rows of logits that liger's fused loss holds at once: about as many bytes as the hidden states have."""
    factor = -(-vocab_size // hidden_size)
    return min(tokens, 1 << (-(-tokens // factor) - 1).bit_length())


def _cast_for_chunks(ops: Ops, head: Weight, dtype: int, *, several: bool) -> None:
    """What autocast makes of a head in another type.

    One product takes its transpose, which is no leaf and is cast anew for each chunk; the other takes the parameter,
    whose copy stays in the cache if it is trained.
    """
    transposed = ops.empty(head.numel, dtype, "buffers")
    del transposed
    ops.lower_weight(head)
    if several:
        transposed = ops.empty(head.numel, dtype, "buffers")
        del transposed


def liger_linear_cross_entropy(ops: Ops, hidden: Tensor, head: Weight) -> Tensor:
    """Liger's fused_linear_cross_entropy: both gradients are made in the forward, one chunk of logits at a time."""
    tokens = hidden.numel // head.width
    vocab_size = head.numel // head.width
    chunk = liger_chunk(tokens, head.width, vocab_size)
    dtype = ops.autocast_dtype if ops.autocast_cache is not None and ops.autocast_dtype is not None else hidden.dtype
    grad_input = ops.empty(hidden.numel, hidden.dtype)
    grad_weight = ops.empty(head.numel, head.dtype, "gradients") if head.node is not None else None
    logits = ops.empty(chunk * vocab_size, dtype, "logits")
    if dtype != head.dtype:
        _cast_for_chunks(ops, head, dtype, several=chunk < tokens)
    del logits
    out = ops.empty(1, FLOAT32)
    saved = tuple(x.storage for x in (grad_input, grad_weight) if x is not None)
    trained = grad_weight is not None
    del grad_input, grad_weight

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        return saved if trained else (saved[0], None)

    return ops.link(out, (hidden, head), saved, backward)
