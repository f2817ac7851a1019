"""The micro-steps of DPO, KTO and reward modelling on paper: which logits are alive while others are made.

Source: llamafactory/train/{dpo,kto,rm}/trainer.py and trainer_utils.get_batch_logps.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamafactory_preflight.memory.layers import loss, step
from llamafactory_preflight.memory.layers.step import Model
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.ledger import Tensor
from llamafactory_preflight.memory.paper.module_hooks import MODEL
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.run import RunDescription


VALUE_HEAD_DROPOUT = 0.1
"""TRL's default, in trl/models/modeling_value_head.py."""


WITHOUT_REFERENCE = ("orpo", "simpo")


def needs_reference(run: RunDescription) -> bool:
    """Whether the stage compares the model with another."""
    return run.stage == "kto" or (run.stage == "dpo" and run.pref_loss not in WITHOUT_REFERENCE)


def loads_reference(run: RunDescription) -> bool:
    """Whether that is a second model and no base without its adapters (trainer_utils.create_ref_model)."""
    return needs_reference(run) and (run.finetuning_type != "lora" or run.ref_model is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The trained model and the one it is compared with: a second model, its own base without adapters, or none.

    Attributes:
        policy: The trained model.
        reference: The other one, or None.
        reference_ops: What that one runs with: DeepSpeed has hooks of their own for the modules of each.
    """

    policy: Model
    reference: Model | None
    reference_ops: Ops


def dpo_step(ops: Ops, pair: Pair, tokens: int) -> None:
    """Chosen and rejected in one batch; the policy's logits wait while the reference makes its own."""
    logits = step.full_logits(ops, pair.policy, tokens)
    result = loss.batch_log_probabilities(ops, logits, whole=pair.policy.alone)
    if pair.reference is not None:
        with pair.reference_ops.no_grad():
            other = step.full_logits(pair.reference_ops, pair.reference, tokens)
            loss.batch_log_probabilities(pair.reference_ops, other, whole=pair.reference.alone)
            del other
    del logits
    step.backward(ops, result)


def kto_step(ops: Ops, pair: Pair, tokens: int) -> None:
    """Two batches of one size for policy and reference, the second (for the divergence) without gradients."""
    result, logits = _kto_forward(ops, pair.policy, tokens)
    assert pair.reference is not None
    with pair.reference_ops.no_grad():
        _kto_forward(pair.reference_ops, pair.reference, tokens)
    del logits
    step.backward(ops, result)


def _kto_forward(ops: Ops, model: Model, tokens: int) -> tuple[Tensor, Tensor]:
    logits = step.full_logits(ops, model, tokens)
    result = loss.batch_log_probabilities(ops, logits, whole=model.alone)
    with ops.no_grad():
        divergence = step.full_logits(ops, model, tokens)
        loss.batch_log_probabilities(ops, divergence, whole=model.alone)
        del divergence
    by_kind = ops.empty(logits.numel, FLOAT32, "logits")  # chosen and rejected are picked out by a mask: copies
    return result, by_kind


def reward_step(ops: Ops, model: Model, value_head: Weight, tokens: int) -> None:
    """TRL's value head on the last hidden states. The batch has labels, so the language head and its loss run too.

    Their graph lives until the loss is dropped, and the logits are turned to float32 once more before they are.
    """
    ops.begin_forward()
    with ops.autocast():
        nothing = Tensor(0, value_head.dtype, value_head.storage)
        values = ops.module(nothing, value_head, lambda x: _values(ops, model, value_head, tokens), name=MODEL)
    step.backward(ops, values)


def _values(ops: Ops, model: Model, value_head: Weight, tokens: int) -> Tensor:
    """The forward of TRL's model, which looks up where its head's weight lies."""
    step.begin_containers(ops, model)
    hidden = step.hidden_states(ops, model, tokens)
    logits = step.head(ops, model, hidden)
    unused = loss.cross_entropy(ops, logits)
    hidden = step.end_containers(ops, model, hidden)
    ops.borrow(value_head)
    ops.begin_container()
    ops.begin_container()
    dropped = ops.end_container(ops.dropout(hidden, VALUE_HEAD_DROPOUT))
    values = ops.linear(ops.cast(dropped, value_head.dtype), value_head)
    del hidden, dropped
    high = ops.cast(logits, FLOAT32, "logits")
    del logits
    del high, unused
    return ops.end_container(values)
