"""The longest micro-batch that a run's arguments allow: sequences, their length, and the mask that comes with them."""

from __future__ import annotations

from dataclasses import dataclass

from llamafactory_preflight.run import RunDescription


PAD_MULTIPLE = 8
"""LLaMA-Factory's collators pad to it in training."""
PAIRED_STAGES = ("rm", "dpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """`sequences` of `length` tokens each.

    Attributes:
        mask: `none`, `boolean` (made by transformers from a padded batch) or `additive` (made by LLaMA-Factory's neat
            packing, or by transformers for eager attention).
        positions: Position ids come with every sequence instead of once.
        prefetched: Micro-batches on the card at once: the Trainer fetches those of a whole step to count their tokens.
    """

    sequences: int
    length: int
    mask: str
    positions: bool
    prefetched: int = 1

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.sequences * self.length


def attention_kernel(run: RunDescription) -> str:
    """`sdpa`, `fa2` or `eager`; `auto` leaves it to transformers, which takes sdpa."""
    return {"disabled": "eager", "fa2": "fa2"}.get(run.flash_attn, "sdpa")


def training_batch(run: RunDescription, length: int | None = None) -> Batch:
    """The batch of one micro-step at the cutoff, or at a given longest sample.

    A packed sequence is as long as the cutoff: LLaMA-Factory takes a token off the cutoff (data_args.py) and adds one for
    padding (processor/supervised.py). Only one that is padded further, to the multiple, has a mask without neat packing.
    """
    packed = run.neat_packing or bool(run.packing)
    tokens = run.cutoff_len if length is None or packed else length
    padded = -(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE
    eager = attention_kernel(run) == "eager"
    mask = "none"
    if eager or (run.neat_packing and attention_kernel(run) != "fa2"):
        mask = "additive"
    elif packed and padded > tokens and run.stage != "pt" and attention_kernel(run) == "sdpa":
        mask = "boolean"
    sequences = run.per_device_train_batch_size * (2 if run.stage in PAIRED_STAGES else 1)
    return Batch(
        sequences=sequences,
        length=padded,
        mask=mask,
        positions=packed and run.stage != "pt",
        prefetched=run.gradient_accumulation_steps,
    )


def evaluation_batch(run: RunDescription) -> Batch:
    """The batch of one evaluation step: its size is an argument of its own, 8 by default."""
    mask = "additive" if attention_kernel(run) == "eager" else "none"
    sequences = run.per_device_eval_batch_size * (2 if run.stage in PAIRED_STAGES else 1)
    return Batch(sequences=sequences, length=run.cutoff_len, mask=mask, positions=False)
