"""A vision tower of the Qwen family on paper: patches of images in, features for the language model out.

The tower is frozen. Where nothing in it requires a gradient, it leaves nothing but its results; where its patch
embedding does, it keeps all that a backward needs, since LLaMA-Factory checkpoints only layers that are trained.

Source: transformers' models qwen3_vl, qwen2_5_vl and qwen2_vl, and modeling_utils.enable_input_require_grads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamafactory_preflight.memory.batch import Batch
from llamafactory_preflight.memory.layers import attention, norms
from llamafactory_preflight.memory.layers.adapters import Linear, Quantization
from llamafactory_preflight.memory.layers.attention import AttentionCall
from llamafactory_preflight.memory.layers.decoder import Kernels
from llamafactory_preflight.memory.paper.dtypes import FLOAT32
from llamafactory_preflight.memory.paper.graph import Weight
from llamafactory_preflight.memory.paper.growth import Growth
from llamafactory_preflight.memory.paper.ledger import Leaf, Storage, Tensor
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.model.vision import TowerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What the tower returns; the model's forward holds all of it while the language model runs.

    Attributes:
        last: Patches behind the last block.
        tokens: They merged to tokens.
        stacked: Tokens of the blocks whose output goes to the first layers too.
        pixels: The images in the tower's type, where they came in it.
    """

    last: Tensor
    tokens: Tensor
    stacked: Sequence[Tensor]
    pixels: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """The tower with the images of one micro-batch.

    Attributes:
        shape: Its sizes.
        linears: One of each kind: `qkv`, `proj`, `up`, `down`, `gate` where the MLP is gated, `merge` and `out`.
        norm: A norm's weight.
        images: Patches of every image.
        pixels: The processor's output for all micro-batches of a step, float32.
        dtype: The weights' type.
        liger: Whether liger's norms take the place of the model's.
        eager: Whether attention writes its scores out.
        requires_grad: Whether the patch embedding's output is made to require a gradient.
        lowers: Whether it turns the pixels to its own type; under DeepSpeed the Trainer has, and keeps those too.
    """

    shape: TowerShape
    linears: Mapping[str, Linear]
    norm: Weight
    images: Sequence[int]
    pixels: Tensor
    dtype: int
    liger: bool
    eager: bool
    requires_grad: bool
    lowers: bool

    @property
    def patches(self) -> int:
        """Patches of all images."""
        return sum(self.images)

    def __call__(self, ops: Ops) -> Features:
        """Runs the tower on all images at once."""
        shape, patches = self.shape, self.patches
        lowered = ops.empty(patches * shape.patch_numel, self.dtype)
        x = ops.empty(patches * shape.hidden_size, self.dtype)
        if self.requires_grad and ops.grad_enabled:
            x.node = Leaf(keeps=x.storage)
        if shape.window is None:
            positions = ops.empty(x.numel, x.dtype)
            x = ops.add(x, positions) if shape.num_stacked else x
        else:
            x = gather(ops, x, x.numel)
        head_dim = shape.hidden_size // shape.num_heads
        cos, sin = (ops.empty(patches * head_dim, FLOAT32) for _ in range(2))
        angles = ops.empty(patches * head_dim * 3 // 2, FLOAT32)  # rows and columns, and both once more
        stacked: list[Tensor] = []
        for window, count in self._kinds():
            if len(stacked) < shape.num_stacked:
                stacked += [self._merge(ops, x) for _ in range(shape.num_stacked)]
            growth = Growth(ops)
            x = self._block(ops, x, (cos, sin), window)
            left = growth.book(count - 1)
            x = ops.link(x.detach(), (x,), tuple(left), lambda grad, saved: (grad,))
            del left
        tokens = self._merge(ops, x)
        if shape.window is not None:
            tokens = gather(ops, tokens, tokens.numel)
        del angles
        return Features(last=x, tokens=tokens, stacked=stacked, pixels=None if self.lowers else lowered)

    def _kinds(self) -> list[tuple[int | None, int]]:
        """The blocks by their windows. The first stands alone: its input may be a leaf of the graph and is kept."""
        shape = self.shape
        full = min(shape.num_full_attention_blocks, shape.depth - 1) if shape.window is not None else shape.depth - 1
        kinds = [(shape.window, 1), (shape.window, shape.depth - 1 - full), (None, full)]
        return [(window, count) for window, count in kinds if count]

    def _block(self, ops: Ops, x: Tensor, tables: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        normed = self._norm(ops, x)
        attended = self._attention(ops, normed, tables, window)
        del normed
        x = ops.add(x, attended)
        del attended
        normed = self._norm(ops, x)
        return ops.add(x, self._mlp(ops, normed))

    def _norm(self, ops: Ops, x: Tensor) -> Tensor:
        if not self.shape.rms_norm:
            return norms.layer_norm(ops, x, self.norm, liger=self.liger)
        return norms.liger_rms_norm(ops, x, self.norm) if self.liger else norms.rms_norm(ops, x, self.norm)

    def _attention(self, ops: Ops, x: Tensor, tables: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        fused = self.linears["qkv"](ops, x)
        q, k, v = attention.split(ops, fused, (1, 1, 1))
        del fused
        wide = [ops.cast(each, FLOAT32) for each in (q, k)]
        turned = [attention.rotate(ops, each, *tables) for each in wide]
        q, k = (ops.cast(turned.pop(0), dtype) for dtype in (q.dtype, k.dtype))
        del wide, turned
        parts = [self._attend(ops, part) for part in self._split(ops, (q, k, v), window)]
        out = attention.join(ops, parts)
        del parts
        return self.linears["proj"](ops, out)

    def _split(
        self, ops: Ops, tensors: Sequence[Tensor], window: int | None
    ) -> list[tuple[AttentionCall, list[Tensor]]]:
        """Images, or what stands for all windows of them together."""
        shape = self.shape
        lengths = self.images if window is None else [self.patches]
        pieces = [attention.split(ops, each, lengths) for each in tensors]
        calls = [
            AttentionCall(
                batch=1 if window is None else -(-length // window**2),
                length=length if window is None else min(window**2, length),
                num_heads=shape.num_heads,
                num_key_value_heads=shape.num_heads,
                head_dim=shape.hidden_size // shape.num_heads,
            )
            for length in lengths
        ]
        return [(call, list(piece)) for call, piece in zip(calls, zip(*pieces, strict=True), strict=True)]

    def _attend(self, ops: Ops, part: tuple[AttentionCall, list[Tensor]]) -> Tensor:
        call, (q, k, v) = part
        if not self.eager:
            return attention.flash(ops, q, k, v, call)
        scores = attention.matmul(ops, q, k, call.scores)
        scores = ops.scale(scores)
        probabilities = attention.softmax(ops, scores)
        del scores
        probabilities = ops.cast(probabilities, q.dtype)
        return ops.clone(attention.matmul(ops, probabilities, v, q.numel))

    def _mlp(self, ops: Ops, x: Tensor) -> Tensor:
        if self.shape.gated:
            gate = ops.unary(self.linears["gate"](ops, x))
            return self.linears["down"](ops, ops.mul(gate, self.linears["up"](ops, x)))
        activation = ops.quick_gelu if self.shape.quick_gelu else ops.unary
        return self.linears["down"](ops, activation(self.linears["up"](ops, x)))

    def _merge(self, ops: Ops, x: Tensor) -> Tensor:
        x = self._norm(ops, x)
        hidden = ops.unary(self.linears["merge"](ops, x))
        return self.linears["out"](ops, hidden)


def frozen_tower(
    ops: Ops,
    shape: TowerShape,
    batch: Batch,
    kernels: Kernels,
    *,
    dtype: int,
    kind: Quantization | None,
    hooked: bool,
    lowers: bool,
) -> Tower:
    """The tower for a batch; its weights are booked with the model's.

    Args:
        ops: The operations.
        shape: The tower.
        batch: The batch with its images.
        kernels: Which implementations the run uses.
        dtype: The weights' type.
        kind: How linear layers are stored.
        hooked: Whether PEFT lets inputs require a gradient.
        lowers: Whether the pixels come in another type.
    """
    booked = Storage(ops.ledger, 0, "weights")
    linears = {
        name: Linear(weight=Weight(a * b, dtype, booked, width=a), quantization=kind)
        for name, (a, b) in shape.linears.items()
    }
    return Tower(
        shape=shape,
        linears=linears,
        norm=Weight(shape.hidden_size, dtype, booked),
        images=batch.images,
        pixels=ops.empty(sum(batch.images) * shape.patch_numel * batch.prefetched, FLOAT32, "buffers"),
        dtype=dtype,
        liger=kernels.liger,
        eager=kernels.attention == "eager",
        requires_grad=hooked and shape.requires_grad,
        lowers=lowers,
    )


def gather(ops: Ops, x: Tensor, numel: int) -> Tensor:
    """x[index]: its gradient is a tensor of zeros to which rows are added."""
    out = ops.empty(numel, x.dtype)
    size = x.nbytes
    return ops.link(out, (x,), (), lambda grad, saved: (ops.storage(size),))


def place(ops: Ops, embedded: Tensor, tokens: Tensor) -> Tensor:
    """Puts the images' tokens where their placeholders stand (masked_scatter), after counting those.

    Counting copies the placeholders' rows by an element-wise mask, whose numbers are 64 bit and three to an element;
    the kernel makes that mask contiguous and sums it up in 64 bit.
    """
    tokens = ops.cast(ops.clone(tokens), embedded.dtype)
    with ops.no_grad():
        mask = ops.storage(embedded.numel)
        numbers = ops.storage(3 * 8 * tokens.numel)
        picked = ops.empty(tokens.numel, embedded.dtype)
        del mask, numbers, picked
    out = ops.empty(embedded.numel, embedded.dtype)
    scratch = [ops.storage(8 * embedded.numel), ops.storage(embedded.numel)]
    del scratch
    size, token_size, numel = embedded.nbytes, tokens.nbytes, tokens.numel
    wants_tokens = tokens.node is not None

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> tuple[Storage | None, ...]:
        to_embedded = ops.storage(size)
        if not wants_tokens:
            return (to_embedded, None)
        numbers = ops.storage(3 * 8 * numel)
        to_tokens = ops.storage(token_size)
        del numbers
        return (to_embedded, to_tokens)

    return ops.link(out, (embedded, tokens), (), backward)


def stack(ops: Ops, x: Tensor, features: Tensor) -> Tensor:
    """Adds the features of one stacked block to the images' rows of the hidden states, in a copy of those."""
    x = ops.clone(x)
    size = x.nbytes
    picked = gather(ops, x, features.numel)
    summed = ops.add(picked, ops.cast(features, x.dtype))
    del picked
    part = summed.nbytes

    def backward(grad: Storage, saved: tuple[Storage, ...]) -> tuple[Storage | None, ...]:
        return (ops.storage(size), ops.storage(part))

    return ops.link(x.detach(), (x, summed), (), backward)
