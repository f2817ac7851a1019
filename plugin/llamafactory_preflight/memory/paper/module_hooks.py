"""What runs around the forward and backward of modules: ZeRO-3's hooks, which gather weights and let them go."""

from __future__ import annotations

from typing import Protocol


Key = tuple[int, str]
"""A parameter's layer and name."""
MODEL, PEFT_MODEL, ADAPTER = BORROWERS = "model", "peft_model", "adapter"
"""Modules that read the weight of another one: a whole model whose loss is fused with its head, with PEFT's model
around it or not, and PEFT's module around a linear layer, which looks up the type of its adapter."""

EXPERTS = "experts"
"""A sparse layer's router and experts, which LLaMA-Factory makes one module to DeepSpeed (add_z3_leaf_module)."""


class Modules(Protocol):
    """Hooks on all modules."""

    def begin_forward(self) -> None:
        """Before the forward of the whole model."""

    def enter(self, module: str, key: Key) -> None:
        """Before the forward of a module with a weight, and before its backward."""

    def leave(self, module: str, key: Key) -> None:
        """After it."""

    def enter_container(self) -> None:
        """Before the forward or backward of a module without a weight of its own."""

    def borrow(self, key: Key) -> None:
        """A module reads the weight of another one."""

    def hold(self, key: Key) -> None:
        """A function keeps a view of a weight for its backward, and with it the whole weight, gathered as it is."""

    def let_go(self, key: Key) -> None:
        """The function is gone."""
