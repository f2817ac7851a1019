"""What a reader should know of an estimate: a sentence for each value that was inferred or may turn out otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from llamafactory_preflight.data.images import Images
from llamafactory_preflight.memory import badam
from llamafactory_preflight.memory.batch import Batch, adds_dummy_image, attention_kernel
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.layers.checkpointing import hooks_inputs
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.run import RunDescription


def remarks(run: RunDescription, shape: ModelShape, batch: Batch, images: Images | None = None) -> Iterator[str]:
    """The sentences for a run."""
    yield f"A micro-batch is {batch.sequences} x {batch.length} tokens, the longest that the arguments allow."
    if run.gradient_checkpointing and run.disable_gradient_checkpointing:
        yield "`gradient_checkpointing: true` makes the Trainer checkpoint although it is disabled elsewhere."
    if run.use_badam:
        yield badam.remark(run, shape.num_layers)
    if run.enable_liger_kernel and not shape.family.liger:
        yield f"LLaMA-Factory has no liger kernels for {shape.model_type}: the logits are written out."
    if batch.sequences > 1 and batch.mask == "none" and not run.packing and attention_kernel(run) == "sdpa":
        yield "Samples are taken to be equally long: shorter ones are padded, and their mask takes some more memory."
    if shape.moe is not None and not shape.moe.stacked:
        yield "All experts are taken to get equally many tokens; a router that prefers some moves a peak by little."
    if images is not None:
        yield images.reason
        if keeps_tower(run, shape):
            yield "The frozen vision tower keeps its activations: transformers 5 lets its input require a gradient."
    elif shape.vision is not None:
        yield "This is for text alone: images add their tokens and the vision tower's activations."
    if adds_dummy_image(run, shape.vision, images):
        yield "A batch without images gets a blank one from LLaMA-Factory, which makes it longer and needs a mask."
    if run.adapter_name_or_path and run.finetuning_type in ADAPTERS:
        yield "A resumed adapter keeps its own rank and targets; those of the arguments were counted."


def by_size(run: RunDescription, shape: ModelShape) -> Iterator[str]:
    """What was counted by its size alone, so that the bounds are wide."""
    kind = quantization(run, shape)
    if kind is not None and not kind.exact:
        yield f"{kind.method.upper()} weights are counted by size and their kernels not at all: the bounds are wide."
    full = run.finetuning_type in ("full", "freeze") and not run.pure_bf16
    if shape.moe is not None and shape.moe.stacked and full:
        yield "Training experts in float32 was neither measured nor simulated: the bounds are wide."
    if shape.family.masked_loss and not run.enable_liger_kernel:
        yield "The loss of Gemma 3 with its vision tower was not measured: the bounds are wide."


def keeps_tower(run: RunDescription, shape: ModelShape) -> bool:
    """Whether adapters with gradient checkpointing make the frozen vision tower keep all for a backward."""
    tower = shape.vision.tower if shape.vision is not None else None
    hooked = run.finetuning_type in ADAPTERS and hooks_inputs(run, shape)
    return tower is not None and tower.requires_grad and hooked
