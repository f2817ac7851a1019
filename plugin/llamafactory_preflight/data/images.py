"""The images of a training sample: how many patches of them a vision tower gets, at most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamafactory_preflight.model.vision import MARKS, TowerShape, VisionShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription


AS_ALLOWED = "Images are taken to be as large as `image_max_pixels: {limit}` allows ({tokens} tokens each), {many}."
AS_FITS = "Images are taken to be as large as fits into {limit} tokens ({tokens} tokens each), {many}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of the sample that has most of them.

    Attributes:
        patches: Patches of each.
        exact: They were counted in the tokenized data; otherwise they are as large as the arguments allow.
        reason: How they were found out, as a sentence.
    """

    patches: tuple[int, ...]
    exact: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What the tokenized data says: the most images and the most image tokens that a sample has."""

    images: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the images of a run come from.

    Attributes:
        tower: The tower.
        count: Images of the sample that has most of them, or None where that is not known.
        counted: What the tokenized data says, once there is some.
    """

    tower: TowerShape
    count: int | None
    counted: Counted | None = None

    def of(self, run: RunDescription, length: int | None = None) -> Images:
        """The images of a sample of `length` tokens, or of as many as the cutoff allows."""
        return self._shared(self.counted) if self.counted is not None else self._largest(run, length or run.cutoff_len)

    def _shared(self, counted: Counted) -> Images:
        """Images that have the counted tokens in equal parts."""
        number = max(1, min(counted.images, counted.tokens))
        share, rest = divmod(counted.tokens, number)
        return Images(
            patches=tuple((share + (index < rest)) * self.tower.merged for index in range(number)),
            exact=True,
            reason=phrase(
                "A sample has up to {images} images, which are up to {tokens} tokens.",
                images=counted.images,
                tokens=counted.tokens,
            ),
        )

    def _largest(self, run: RunDescription, length: int) -> Images:
        """Images as large as `image_max_pixels` allows, and no more of them than a sample can hold.

        LLaMA-Factory writes a token for every few patches before it cuts a sample at the cutoff, and one whose images
        are cut off fails in the model; so those that train fit in. It scales an image to the limit, and the processor
        rounds its sides to whole tokens (data/mm_plugin.py, transformers' smart_resize).
        """
        side = max(1, round(math.sqrt(run.image_max_pixels) / (self.tower.patch_size * self.tower.merge_size)))
        tokens, limit, sentence = side * side, run.image_max_pixels, AS_ALLOWED
        number = max(1, length // (tokens + MARKS)) if self.count is None else self.count
        fitting = max(1, length // number - MARKS)
        if tokens > fitting:
            tokens, limit, sentence = fitting, length, AS_FITS
        known = phrase("and {number} in a sample, the most in the data set", number=number)
        many = "and as many as fit" if self.count is None else known
        return Images(
            patches=(tokens * self.tower.merged,) * number,
            exact=False,
            reason=phrase(sentence, limit=limit, tokens=tokens, many=many),
        )


def blank(vision: VisionShape) -> tuple[int, ...]:
    """Patches of the blank image that LLaMA-Factory adds to a batch without any."""
    return ((vision.dummy_tokens - MARKS) * vision.tower.merged,) if vision.tower is not None else ()
