"""One micro-batch on paper: embedding, layers, loss and backward. Two or three layers are run, the rest is booked.

All layers between are alike, so their bytes are added in one block: in the forward after the last but one of those that are
run, and in the backward before it. Peaks inside them lie between those of the layers that are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory import checkpointing, loss
from llamafactory_preflight.memory.decoder import DecoderLayer
from llamafactory_preflight.memory.dtypes import FLOAT32, INT8
from llamafactory_preflight.memory.ops import Ops, Weight
from llamafactory_preflight.memory.paper import Gradients, Leaf, Storage, Tensor, run_backward

@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a micro-step runs.

    Attributes:
        embedding: The input embedding.
        final_norm: The norm behind the last layer.
        head: The output embedding; the input embedding itself where they are tied.
        layers: The layers that are run: the first, for runs without checkpointing a second, and the last.
        num_layers: Layers of the real model.
        layer_gradient_bytes: What one layer's gradients take if they are made anew in each step.
        checkpointing: `reentrant`, `non_reentrant`, `host` (use_unsloth_gc) or `off`.
        input_requires_grad: Whether the embedding's output is made to require a gradient (PEFT with checkpointing).
        liger_loss: Whether liger's fused loss takes the place of head and loss in training.
        converts_outputs: Whether accelerate turns the outputs to float32 behind the forward (mixed precision).
    """

    embedding: Weight
    final_norm: Weight
    head: Weight
    layers: Sequence[DecoderLayer]
    num_layers: int
    layer_gradient_bytes: int
    checkpointing: str
    input_requires_grad: bool
    liger_loss: bool
    converts_outputs: bool


def language_model_step(ops: Ops, model: Model, tokens: int) -> None:
    """Forward and backward of the causal language-model loss; the ledger holds the peak afterwards."""
    logits = None
    with ops.autocast():
        hidden = hidden_states(ops, model, tokens)
        if model.liger_loss:
            result = loss.liger_linear_cross_entropy(ops, hidden, model.head)
        else:
            logits = ops.linear(hidden, model.head, "logits")
            result = loss.cross_entropy(ops, logits)
        del hidden
    if logits is not None:
        logits = convert(ops, model, logits)
    del logits
    backward(ops, result)


def evaluation_step(ops: Ops, model: Model, tokens: int) -> None:
    """Forward and loss without gradients: liger's fused loss works in training only, so the logits are written out."""
    with ops.no_grad():
        with ops.autocast():
            logits = ops.linear(hidden_states(ops, model, tokens), model.head, "logits")
            loss.cross_entropy(ops, logits)
        convert(ops, model, logits)


def full_logits(ops: Ops, model: Model, tokens: int) -> Tensor:
    """The model's forward without labels, and its logits in float32 as the preference stages ask for them."""
    with ops.autocast():
        logits = ops.linear(hidden_states(ops, model, tokens), model.head, "logits")
    return ops.cast(logits, FLOAT32, "logits")


def convert(ops: Ops, model: Model, logits: Tensor) -> Tensor:
    """accelerate's ConvertOutputsToFp32."""
    return ops.cast(logits, FLOAT32, "logits") if model.converts_outputs else logits


def backward(ops: Ops, result: Tensor) -> None:
    """loss.backward()."""
    assert result.node is not None
    run_backward(result.node, Storage(ops.ledger, 4, "activations"))


def hidden_states(ops: Ops, model: Model, rows: int) -> Tensor:
    """Embedding, layers and final norm."""
    x = ops.embedding(rows, model.embedding)
    if model.input_requires_grad and x.node is None and ops.grad_enabled:
        x.node = Leaf(keeps=x.storage)
    block = _Block(ops, model)
    for layer in model.layers[:-1]:
        block.start()
        x = _run(ops, model.checkpointing, layer, x)
    x = block.repeat(x)
    last = model.layers[-1]
    x = _run(ops, model.checkpointing, last, x)
    return last.norm_with(ops, x, model.final_norm)


def _run(ops: Ops, kind: str, layer: DecoderLayer, x: Tensor) -> Tensor:
    if kind == "off" or not ops.grad_enabled:
        return layer(ops, x)
    if kind == "non_reentrant":
        return checkpointing.non_reentrant(ops, layer, x)
    return checkpointing.reentrant(ops, layer, x, on_host=kind == "host")


class _Block:
    """The layers that are not run: what they leave behind in the forward, and their gradients in the backward."""

    def __init__(self, ops: Ops, model: Model) -> None:
        self.ops, self.model = ops, model
        self.count = model.num_layers - len(model.layers)
        self.left: list[Storage] = []
        self.gradients: Storage | None = None

    def start(self) -> None:
        """Notes what is live before a layer."""
        self.before, self.cached_before = self.ops.ledger.parts.copy(), self._cached_bytes()

    def repeat(self, x: Tensor) -> Tensor:
        """Books what the layer since `start` left, once more for each missing layer."""
        ops, ledger = self.ops, self.ops.ledger
        grown = {name: size - self.before[name] for name, size in ledger.parts.items()}
        cached = self._cached_bytes() - self.cached_before
        if cached and ops.autocast_cache is not None:
            block = ops.empty(cached * self.count, INT8, "buffers")
            ops.autocast_cache[block] = block
            grown["buffers"] -= cached
            if self.model.checkpointing == "off":
                self.left.append(block.storage)
        self.left += [Storage(ledger, size * self.count, name) for name, size in grown.items() if size > 0]
        return ops.link(x.detach(), (x,), (), self._to_gradients)

    def _cached_bytes(self) -> int:
        return sum(x.storage.size for x in (self.ops.autocast_cache or {}).values())

    def _to_gradients(self, grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        self.left.clear()
        if self.model.layer_gradient_bytes:
            self.gradients = Storage(self.ops.ledger, self.model.layer_gradient_bytes * self.count, "gradients")
        return (grad,)
