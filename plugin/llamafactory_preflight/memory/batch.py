"""The longest micro-batch that a run's arguments allow: sequences, their length, and the mask that comes with them."""

from __future__ import annotations

from dataclasses import dataclass

from llamafactory_preflight.data.images import Images, blank
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import FLOAT32, INT64
from llamafactory_preflight.model.vision import VisionShape
from llamafactory_preflight.run import RunDescription


PAD_MULTIPLE = 8
"""LLaMA-Factory's collators pad to it in training."""
ID_ROWS = 4
"""Input ids, labels, shifted labels and attention mask, 64 bit each."""
POSITION_ROWS = 4
"""What LLaMA-Factory's collator makes for models with rotary positions in text, time, height and width."""
PAIRED_STAGES = ("rm", "dpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """`sequences` of `length` tokens each.

    Attributes:
        mask: `none`, `boolean` (made by transformers from a padded batch) or `additive` (made by LLaMA-Factory's neat
            packing, or by transformers for eager attention).
        positions: Position ids come with every sequence instead of once.
        id_rows: Numbers of 64 bit that come with every token.
        images: Patches of each of its images; LLaMA-Factory's blank one where no sample has any.
        prefetched: Micro-batches on the card at once: the Trainer fetches those of a whole step to count their tokens.
    """

    sequences: int
    length: int
    mask: str
    positions: bool
    id_rows: int = ID_ROWS
    images: tuple[int, ...] = ()
    prefetched: int = 1

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.sequences * self.length

    def rotary_numel(self, head_dim: int) -> int:
        """Elements of a table of cosines: a row a position, for each sequence where their positions differ."""
        return (self.sequences if self.positions else 1) * self.length * head_dim


def attention_kernel(run: RunDescription) -> str:
    """`sdpa`, `fa2` or `eager`; `auto` leaves it to transformers, which takes sdpa."""
    return {"disabled": "eager", "fa2": "fa2"}.get(run.flash_attn, "sdpa")


def training_batch(
    run: RunDescription, vision: VisionShape | None = None, length: int | None = None, images: Images | None = None
) -> Batch:
    """The batch of one micro-step at the cutoff, or at a given longest sample."""
    count = run.gradient_accumulation_steps
    return _batch(run, run.per_device_train_batch_size, vision, length, images, prefetched=count)


def evaluation_batch(
    run: RunDescription, vision: VisionShape | None = None, length: int | None = None, images: Images | None = None
) -> Batch:
    """The batch of one evaluation step: its size is an argument of its own, 8 by default."""
    return _batch(run, run.per_device_eval_batch_size, vision, length, images, prefetched=1)


def fetched_bytes(run: RunDescription, batch: Batch, vision: VisionShape | None, *, mask: int) -> int:
    """Bytes on the card of what the Trainer fetches for one step: it lets go of them when it has fetched the next.

    Args:
        run: The run.
        batch: One of its micro-batches.
        vision: The vision tower's sizes, if the model sees.
        mask: Type of the masks that neat packing makes.

    Source: transformers.Trainer, `batch_samples` in the training loop.
    """
    ids = batch.id_rows * batch.tokens * dtypes.size(INT64)
    packed = run.neat_packing and batch.mask == "additive"
    masks = batch.sequences * batch.length**2 * dtypes.size(mask) if packed else 0
    tower = vision.tower if vision is not None else None
    pixels = sum(batch.images) * tower.patch_numel * dtypes.size(FLOAT32) if tower is not None else 0
    return (ids + masks + pixels) * batch.prefetched


def adds_dummy_image(run: RunDescription, vision: VisionShape | None, images: Images | None = None) -> bool:
    """Whether LLaMA-Factory's collator puts a blank image behind the first sample of a batch that has no images."""
    return images is None and vision is not None and run.template in vision.templates and run.stage != "pt"


def _batch(
    run: RunDescription,
    samples: int,
    vision: VisionShape | None,
    length: int | None,
    images: Images | None,
    *,
    prefetched: int,
) -> Batch:
    """A batch as LLaMA-Factory collates it.

    A packed sequence is as long as the cutoff: LLaMA-Factory takes a token off it (data_args.py) and adds one of
    padding (processor/supervised.py). Padding to a multiple, or beside a blank image, makes a mask necessary.
    """
    packed = run.neat_packing or bool(run.packing)
    tokens = run.cutoff_len if length is None or packed else length
    dummy = adds_dummy_image(run, vision, images)
    longest = tokens + vision.dummy_tokens if dummy and vision is not None else tokens
    padded = longest if run.stage == "pt" else -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    kernel = attention_kernel(run)
    mask = "none"
    if kernel == "eager" or (run.neat_packing and kernel != "fa2"):
        mask = "additive"
    elif padded > tokens and kernel == "sdpa":
        mask = "boolean"
    return Batch(
        sequences=samples * (2 if run.stage in PAIRED_STAGES else 1),
        length=padded,
        mask=mask,
        positions=(packed and run.stage != "pt") or vision is not None,
        id_rows=ID_ROWS + (POSITION_ROWS if vision is not None and vision.tower is not None else 0),
        images=images.patches * samples if images is not None else blank(vision) if dummy and vision else (),
        prefetched=prefetched,
    )
