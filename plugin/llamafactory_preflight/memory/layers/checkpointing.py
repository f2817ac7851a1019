"""Gradient checkpointing on paper: torch's two kinds and LLaMA-Factory's, which keeps a layer's input on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from llamafactory_preflight.memory.batch import Batch
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BOOL
from llamafactory_preflight.memory.paper.ledger import Gradients, Leaf, Node, Storage, Tensor, run_backward
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


Layer = Callable[[Ops, Tensor], Tensor]


def reentrant(ops: Ops, layer: Layer, x: Tensor, *, on_host: bool = False) -> Tensor:
    """torch.utils.checkpoint(use_reentrant=True); with `on_host`, LLaMA-Factory's `use_unsloth_gc`.

    The backward runs the layer again on a detached input and then a backward of its own, holding the incoming gradient
    and the layer's output until it is done.
    """
    with ops.no_grad():
        out = layer(ops, x).detach()
    numel, dtype, nbytes = x.numel, x.dtype, x.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> Gradients:
        storage = ops.storage(nbytes) if on_host else saved[0]
        leaf = Leaf()
        with ops.enable_grad(), ops.autocast():
            again = layer(ops, Tensor(numel, dtype, storage, leaf))
        assert again.node is not None
        run_backward(again.node, grad)
        return (leaf.grad,)

    return ops.link(out, (x,), () if on_host else (x.storage,), backward)


def kept_arguments(run: RunDescription, batch: Batch, shape: ModelShape, *, item: int) -> int:
    """Bytes that the graph of a backward holds after it: arguments of the layers that ran again, if any did.

    They are the rotary tables, and a mask that transformers made.

    Args:
        run: The run.
        batch: The micro-batch.
        shape: The model.
        item: Bytes of an element of the hidden states.

    Source: torch.utils.checkpoint.CheckpointFunction, whose context holds the layer with its arguments; accelerate's
    DeepSpeedEngineWrapper.backward, which updates weights before that graph goes.
    """
    if checkpointing_kind(run) not in ("reentrant", "host"):
        return 0
    made = {"boolean": dtypes.size(BOOL), "additive": 0 if run.neat_packing else item}
    mask = batch.sequences * batch.length**2 * made.get(batch.mask, 0)
    return mask + 2 * batch.rotary_numel(shape.head_dim) * item


class _EnoughSavedError(Exception):
    """Ends a recomputation at its last saved tensor, as torch's early stop does."""


class _Frame:
    """One layer's functions, whose saved tensors are made again when the first of them is asked for.

    Functions outside of the graph that a gradient takes are gone by then, and what they saved is not kept again.
    """

    def __init__(self, ops: Ops, layer: Layer, x: Tensor) -> None:
        self.ops, self.layer, self.x = ops, layer, x
        self.nodes: list[weakref.ref[Node]] = []
        self.done = False

    def drop(self, node: Node) -> None:
        """Forgets what a function saved; it asks for it before its backward."""
        node.saved = ()
        node.recompute = self.restore
        self.nodes.append(weakref.ref(node))

    def restore(self) -> None:
        """Runs the layer again and hands every function what it had saved."""
        if self.done:
            return
        self.done = True
        pending = iter(self.nodes)
        left = len(self.nodes)

        def keep(node: Node) -> None:
            nonlocal left
            original = next(pending)()
            if original is not None:
                original.saved = node.saved
            left -= 1
            if not left:
                raise _EnoughSavedError

        outer, self.ops.saved_hook = self.ops.saved_hook, keep
        try:
            with self.ops.enable_grad(), self.ops.autocast():
                self.layer(self.ops, Tensor(self.x.numel, self.x.dtype, self.x.storage, Leaf()))
        except _EnoughSavedError:
            pass
        finally:
            self.ops.saved_hook = outer
        self.nodes = []


def non_reentrant(ops: Ops, layer: Layer, x: Tensor) -> Tensor:
    """torch.utils.checkpoint(use_reentrant=False): the graph stays, its saved tensors go."""
    frame = _Frame(ops, layer, x)
    outer, ops.saved_hook = ops.saved_hook, frame.drop
    try:
        return layer(ops, x)
    finally:
        ops.saved_hook = outer


def checkpointing_kind(run: RunDescription) -> str:
    """Which checkpointing really runs.

    `gradient_checkpointing: true` makes the Trainer enable it once more, whatever LLaMA-Factory's own switches say.
    Where the launcher asks for FSDP 2, LLaMA-Factory takes torch's other kind (prepare_model_for_training).
    """
    if run.disable_gradient_checkpointing and not run.gradient_checkpointing:
        return "off"
    if run.use_unsloth_gc and not run.disable_gradient_checkpointing:
        return "host"
    plan = run.fsdp_plan
    reentrant = run.use_reentrant_gc and not (plan is not None and plan.version == 2 and plan.launched)
    return "reentrant" if reentrant or run.gradient_checkpointing else "non_reentrant"


def hooks_inputs(run: RunDescription, shape: ModelShape) -> bool:
    """Whether adapters make inputs require a gradient: PEFT leaves that out for quantized models."""
    return checkpointing_kind(run) != "off" and quantization(run, shape) is None
