"""One micro-batch on paper: embedding, layers, loss and backward. Two or three layers are run, the rest is booked.

All layers between are alike, so their bytes are added in one block: in the forward after the last but one of those that are
run, and in the backward before it. Peaks inside them lie between those of the layers that are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory import checkpointing
from llamafactory_preflight.memory.decoder import DecoderLayer
from llamafactory_preflight.memory.ops import Ops, Weight
from llamafactory_preflight.memory.paper import Gradients, Leaf, Storage, Tensor, run_backward

Loss = Callable[[Ops, Tensor], tuple[Tensor, Tensor | None]]
"""Final hidden states to (loss, logits that the model returns or None)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a micro-step runs.

    Attributes:
        embedding: The input embedding.
        layers: The layers that are run: the first, for runs without checkpointing a second, and the last.
        num_layers: Layers of the real model.
        layer_gradient_bytes: What one layer's gradients take if they are made anew in each step.
        checkpointing: `reentrant`, `non_reentrant`, `host` (use_unsloth_gc) or `off`.
        input_requires_grad: Whether the embedding's output is made to require a gradient (PEFT with checkpointing).
    """

    embedding: Weight
    final_norm: Weight
    layers: Sequence[DecoderLayer]
    num_layers: int
    layer_gradient_bytes: int
    checkpointing: str
    input_requires_grad: bool


def micro_step(ops: Ops, model: Model, rows: int, loss: Loss, *, converts_outputs: bool) -> None:
    """Runs forward and backward of `rows` tokens; the ledger holds the peak afterwards.

    Args:
        ops: The operations, with the ledger.
        model: The model.
        rows: Tokens, padding included.
        loss: The head and the loss.
        converts_outputs: Whether accelerate turns the outputs to float32 behind the forward (mixed precision).
    """
    with ops.autocast():
        hidden = _hidden_states(ops, model, rows)
        result, logits = loss(ops, hidden)
        del hidden
    if logits is not None and converts_outputs:
        converted = ops.cast(logits, 4, "logits")
        del converted
    del logits
    assert result.node is not None
    node, result = result.node, result.detach()
    run_backward(node, Storage(ops.ledger, 4, "activations"))


def _hidden_states(ops: Ops, model: Model, rows: int) -> Tensor:
    x = ops.embedding(rows, model.embedding)
    if model.input_requires_grad and x.node is None:
        x.node = Leaf()
    block = _Block(ops, model)
    for layer in model.layers[:-1]:
        block.start()
        x = _checkpointed(ops, model.checkpointing, layer, x)
    x = block.repeat(x)
    last = model.layers[-1]
    x = _checkpointed(ops, model.checkpointing, last, x)
    return last.norm_with(ops, x, model.final_norm)


def _checkpointed(ops: Ops, kind: str, layer: DecoderLayer, x: Tensor) -> Tensor:
    if kind == "off":
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
            block = ops.empty(cached * self.count, 1, "buffers")
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
