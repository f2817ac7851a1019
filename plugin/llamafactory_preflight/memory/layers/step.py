"""One micro-batch on paper: embedding, layers, loss and backward. Two or three layers are run, the rest is booked.

All layers between are alike, so their bytes are added in one block: in the forward after the last but one of those
that are run, and in the backward before it. Peaks inside them lie between those of the layers that are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.layers import checkpointing, loss, tower
from llamafactory_preflight.memory.layers.decoder import DecoderLayer
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.growth import Growth
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Storage, Tensor, run_backward
from llamafactory_preflight.memory.paper.module_hooks import MODEL, PEFT_MODEL
from llamafactory_preflight.memory.paper.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """`count` layers that are alike: one is run, the others are booked.

    Attributes:
        layer: The layer.
        count: How many there are.
        trained: Whether it has trained parameters: LLaMA-Factory checkpoints no other layer.
        gradient_bytes: What one layer's gradients take if they are made anew in each step.
    """

    layer: DecoderLayer
    count: int
    trained: bool
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a micro-step runs.

    Attributes:
        embedding: The input embedding.
        final_norm: The norm behind the last layer.
        head: The output embedding; the input embedding itself where they are tied.
        segments: The layers, from first to last.
        checkpointing: `reentrant`, `non_reentrant`, `host` (use_unsloth_gc) or `off`.
        input_requires_grad: Whether the embedding's output is made to require a gradient (by PEFT with checkpointing).
        liger_loss: Whether liger's fused loss takes the place of head and loss in training.
        masked_loss: Whether the model turns its logits to float32 for a loss that copies those that are not padding
            (Gemma 3 with its vision tower).
        converts_outputs: Whether accelerate turns the outputs to float32 behind the forward (mixed precision).
        noise: Whether NEFTune adds noise to the embeddings.
        wrapped: Whether PEFT's model stands around it.
        upcasts_logits: Whether a hook on the head does so at once (upcast_lmhead_output).
        alone: Whether the batch is a single sequence, whose logits but the last are a whole tensor.
        smooths: Whether the Trainer computes the loss itself, with smoothed labels, on what the model returns.
        tower: The vision tower with the batch's images, or None where there are none.
    """

    embedding: Weight
    final_norm: Weight
    head: Weight
    segments: Sequence[Segment]
    checkpointing: str
    input_requires_grad: bool
    liger_loss: bool
    masked_loss: bool
    converts_outputs: bool
    noise: bool
    wrapped: bool
    upcasts_logits: bool
    alone: bool
    smooths: bool
    tower: tower.Tower | None


def language_model_step(ops: Ops, model: Model, tokens: int) -> None:
    """Forward and backward of the causal language-model loss; the ledger holds the peak afterwards."""
    backward(ops, language_model_loss(ops, model, tokens))


def language_model_loss(ops: Ops, model: Model, tokens: int) -> Tensor:
    """The forward of it, up to where the Trainer has the loss alone."""
    if model.smooths:
        return _smoothed_loss(ops, model, tokens)
    logits = None
    ops.begin_forward()
    with ops.autocast():
        if model.wrapped:
            ops.begin_container()
        if model.liger_loss:  # the head's weight belongs to the whole model's forward
            name = PEFT_MODEL if model.wrapped else MODEL
            nothing = Tensor(0, model.head.dtype, model.head.storage)
            result = ops.module(nothing, model.head, lambda x: _fused(ops, model, tokens), name=name)
        else:
            ops.begin_container()
            hidden = hidden_states(ops, model, tokens)
            logits = head(ops, model, hidden)
            result = ops.end_container(_cross_entropy(ops, model, logits))
            del hidden
        if model.wrapped:
            result = ops.end_container(result)
    if logits is not None:
        logits = convert(ops, model, logits)
    return result


def _smoothed_loss(ops: Ops, model: Model, tokens: int) -> Tensor:
    """The model runs without labels, and its logits wait until the loss is there."""
    with ops.autocast():
        logits = head(ops, model, hidden_states(ops, model, tokens))
    logits = convert(ops, model, logits)
    return loss.smoothed_cross_entropy(ops, logits, whole=model.alone)


def _fused(ops: Ops, model: Model, tokens: int) -> Tensor:
    hidden = hidden_states(ops, model, tokens)
    ops.borrow(model.head)
    return loss.liger_linear_cross_entropy(ops, hidden, model.head)


def evaluation_step(ops: Ops, model: Model, tokens: int) -> None:
    """Forward and loss without gradients: liger's fused loss works in training only, so the logits are written out."""
    ops.begin_forward()
    with ops.no_grad():
        if model.smooths:
            _smoothed_loss(ops, model, tokens)
            return
        with ops.autocast():
            logits = _evaluated(ops, model, tokens)
        convert(ops, model, logits)


def _evaluated(ops: Ops, model: Model, tokens: int) -> Tensor:
    """The logits, with a loss that is made beside them, in the modules that run in training."""
    if not model.liger_loss:
        begin_containers(ops, model)
        return _logits_with_loss(ops, model, tokens)
    if model.wrapped:
        ops.begin_container()
    name = PEFT_MODEL if model.wrapped else MODEL
    nothing = Tensor(0, model.head.dtype, model.head.storage)
    return ops.module(nothing, model.head, lambda x: _logits_with_loss(ops, model, tokens), name=name)


def _logits_with_loss(ops: Ops, model: Model, tokens: int) -> Tensor:
    logits = head(ops, model, hidden_states(ops, model, tokens))
    _cross_entropy(ops, model, logits)
    return logits


def full_logits(ops: Ops, model: Model, tokens: int) -> Tensor:
    """The model's forward without labels, and its logits in float32 as the preference stages ask for them."""
    ops.begin_forward()
    with ops.autocast():
        begin_containers(ops, model)
        logits = end_containers(ops, model, head(ops, model, hidden_states(ops, model, tokens)))
    return ops.cast(logits, FLOAT32, "logits")


def begin_containers(ops: Ops, model: Model) -> None:
    """The language model, or PEFT's two modules, of which the inner one takes its place."""
    if model.wrapped:
        ops.begin_container()
    ops.begin_container()


def end_containers(ops: Ops, model: Model, x: Tensor) -> Tensor:
    """The same modules return this output."""
    x = ops.end_container(x)
    return ops.end_container(x) if model.wrapped else x


def head(ops: Ops, model: Model, hidden: Tensor) -> Tensor:
    """The output embedding."""
    logits = ops.linear(hidden, model.head, "logits")
    return ops.cast(logits, FLOAT32, "logits") if model.upcasts_logits or model.masked_loss else logits


def _cross_entropy(ops: Ops, model: Model, logits: Tensor) -> Tensor:
    return (loss.masked_cross_entropy if model.masked_loss else loss.cross_entropy)(ops, logits)


def convert(ops: Ops, model: Model, logits: Tensor) -> Tensor:
    """Accelerate's ConvertOutputsToFp32."""
    return ops.cast(logits, FLOAT32, "logits") if model.converts_outputs else logits


def backward(ops: Ops, result: Tensor) -> None:
    """loss.backward(), where there is a graph."""
    if result.node is None:
        assert not ops.grad_enabled
        return
    run_backward(result.node, ops.storage(4))


def hidden_states(ops: Ops, model: Model, rows: int) -> Tensor:
    """Embedding, images, layers and final norm."""
    ops.begin_container()
    x = ops.embedding(rows, model.embedding, as_leaf=model.input_requires_grad)
    ops.begin_container()  # the rotary tables, which take no gradient
    if model.noise and ops.grad_enabled:
        x = ops.clone(x)
    features, stacked = None, list[Tensor]()
    if model.tower is not None:
        features = model.tower(ops)
        stacked += features.stacked
        x = tower.place(ops, x, features.tokens)
    start, held = [x], list[Storage]()  # by the model's forward, as the features are, until it returns
    for segment in model.segments:
        block = _Block(ops, model.checkpointing, segment)
        x = _run(ops, model.checkpointing, segment, x)
        before = ops.ledger.live
        start.clear()
        released = before - ops.ledger.live  # no part of what a layer leaves
        x = block.repeat(x)
        held.append(ops.storage(released))
        while stacked:
            x = tower.stack(ops, x, stacked.pop(0))
    x = segment.layer.norm_with(ops, x, model.final_norm)
    del held, features
    return ops.end_container(x)


def _run(ops: Ops, kind: str, segment: Segment, x: Tensor) -> Tensor:
    layer = segment.layer
    if kind == "off" or not segment.trained or not ops.grad_enabled:
        return layer(ops, x)
    if x.node is None:
        x.node = Leaf(keeps=x.storage)
    if kind == "non_reentrant":
        return checkpointing.non_reentrant(ops, layer, x)
    return checkpointing.reentrant(ops, layer, x, on_host=kind == "host")


class _Block:
    """The layers of a segment that are not run: what they leave in the forward, their gradients in the backward."""

    def __init__(self, ops: Ops, checkpointing_kind: str, segment: Segment) -> None:
        self.ops, self.kind, self.segment = ops, checkpointing_kind, segment
        self.growth = Growth(ops)
        self.left: list[Storage] = []
        self.gradients: Storage | None = None

    def repeat(self, x: Tensor) -> Tensor:
        """Books what the layer left, once more for each layer that is not run."""
        missing = self.segment.count - 1
        if not missing:
            return x
        self.left = self.growth.book(missing, cached_too=self.kind == "off")
        return self.ops.link(x.detach(), (x,), (), self._to_gradients)

    def _to_gradients(self, grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        self.left.clear()
        if self.segment.gradient_bytes:
            size = self.segment.gradient_bytes * (self.segment.count - 1)
            self.gradients = Storage(self.ops.ledger, size, "gradients")
        return (grad,)
