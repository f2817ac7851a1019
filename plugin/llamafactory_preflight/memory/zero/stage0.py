"""DeepSpeed without ZeRO on paper: whole gradients, one reduction a step, and a float32 copy of what is trained.

Source: deepspeed 0.18.4, runtime/engine.py (buffered_allreduce_fallback) and runtime/fp16/unfused_optimizer.py, which
wraps any optimizer that is not DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamafactory_preflight.memory.optimizers import OptimizerMemory
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.ledger import Leaf, Ledger, Storage
from llamafactory_preflight.memory.sharding import Key, Parameter


BUCKET = 500_000_000
"""Elements after which gradients are written out together and reduced."""


class WholeGradients:
    """The gradients of a rank under stage 0.

    Args:
        ledger: Books every byte.
        groups: What is trained, in the optimizer's groups.
        item: Bytes of an element of the model.
    """

    def __init__(self, ledger: Ledger, groups: Sequence[Sequence[Parameter]], *, item: int) -> None:
        self.ledger, self.item = ledger, item
        self.trained = [parameter for group in groups for parameter in group]
        self.boundary = True
        self.gathered: dict[Key, Storage] = {}

    def gradient(self, key: Key) -> Storage | None:
        """What a parameter has accumulated."""
        return self.gathered.get(key)

    def receive(self, key: Key, leaf: Leaf) -> None:
        """Keeps a parameter's gradient."""
        assert leaf.grad is not None
        self.gathered[key] = leaf.grad

    def end_backward(self) -> None:
        """allreduce_gradients, behind the last micro-step."""
        if not self.boundary:
            return
        elements = 0
        for number, parameter in enumerate(self.trained):
            elements += parameter.numel
            if elements > BUCKET or number == len(self.trained) - 1:
                flat = Storage(self.ledger, elements * self.item, "gradients")
                del flat
                elements = 0

    def step(self, optimizer: Callable[[Sequence[int]], OptimizerMemory]) -> None:
        """Float32 gradients of everything, then the optimizer."""
        sizes = [parameter.numel for parameter in self.trained]
        high = [Storage(self.ledger, numel * dtypes.size(FLOAT32), "gradients") for numel in sizes]
        scratch = Storage(self.ledger, optimizer(sizes).step, "buffers")
        del scratch, high
        self.gathered = {}
