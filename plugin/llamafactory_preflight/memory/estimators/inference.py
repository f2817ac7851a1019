"""What `chat`, `api` and `export` of a model take: weights, the key-value cache, and one step over the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llamafactory_preflight.errors import Unmodelled
from llamafactory_preflight.memory import parameters, statics
from llamafactory_preflight.memory.batch import Batch, training_batch
from llamafactory_preflight.memory.card import Card, cublas_workspace
from llamafactory_preflight.memory.host import PROCESS_BYTES
from llamafactory_preflight.memory.layers import step
from llamafactory_preflight.memory.layers.build import ADAPTERS, Builder
from llamafactory_preflight.memory.layers.step import Model
from llamafactory_preflight.memory.paper import dtypes
from llamafactory_preflight.memory.paper.dtypes import BFLOAT16, FLOAT32
from llamafactory_preflight.memory.paper.ledger import Ledger, Storage
from llamafactory_preflight.memory.paper.ops import Ops
from llamafactory_preflight.memory.precision import precision
from llamafactory_preflight.memory.quantization import quantization
from llamafactory_preflight.memory.refusals import other_code
from llamafactory_preflight.memory.remarks import by_size
from llamafactory_preflight.memory.result import MemoryEstimate, bounds
from llamafactory_preflight.model.shape import ModelShape
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.software import Software


def cache_numel(shape: ModelShape, tokens: int) -> int:
    """Elements of the keys and values of all layers."""
    return 2 * shape.num_layers * shape.key_size * tokens


def generation_step(ops: Ops, model: Model, batch: Batch) -> None:
    """The step over the prompt: it runs every token, and writes out the logits of the last one of each sequence."""
    with ops.autocast():
        step.hidden_states(ops, model, batch.tokens)
        last = ops.empty(batch.sequences * model.head.width, model.embedding.dtype)
        logits = step.head(ops, model, last)
    scores = ops.cast(logits, FLOAT32, "logits")
    processed = ops.empty(scores.numel, FLOAT32, "logits")
    del processed


def inference_estimate(
    run: RunDescription, shape: ModelShape, *, software: Software, card: Card | None = None
) -> MemoryEstimate:
    """Predicts one GPU's memory for a chat with a prompt of `cutoff_len` tokens, or for an export with `export_dir`.

    Source: llamafactory/chat/hf_engine.py, train/tuner.py (export_model), model/adapter.py (adapters are merged as
    they are loaded, but for quantized weights). Known error: -0.7 % to 0 in tests/measured/serving.

    Raises:
        Unmodelled: Another engine than Hugging Face's, or a path without a formula.
    """
    if run.infer_backend not in ("huggingface", "hf"):
        raise Unmodelled(phrase("{backend} takes the share of the card that it is told to", backend=run.infer_backend))
    for reason in other_code(run):
        raise Unmodelled(reason)
    shape = shape.under(software)
    run = replace(
        run, stage="sft", bf16=False, fp16=False, pure_bf16=False, gradient_accumulation_steps=1, packing=False,
        neat_packing=False, per_device_train_batch_size=1, disable_gradient_checkpointing=True,
        gradient_checkpointing=False, enable_liger_kernel=False, neftune_noise_alpha=None,
    )  # fmt: skip
    card = card or Card()
    ledger = Ledger(expandable_segments=card.expandable_segments)
    item = _item(run, precision(run, shape).loaded)
    weights = _weights(run, shape, item, ledger)
    keeps = quantization(run, shape) is not None and bool(run.adapter_name_or_path)
    adapters = statics.total(statics.adapter_groups(run, shape)) * dtypes.size(FLOAT32) if _adapts(run) else 0
    batch = replace(training_batch(run, shape.vision), images=())
    merge = {"weights": weights, "adapters": adapters, "buffers": 0 if keeps else _merge_bytes(shape, adapters)}
    if run.export_dir is not None:
        return _export(run, merge, tokens=batch.tokens)
    held = [Storage(ledger, weights, "weights"), Storage(ledger, adapters if keeps else 0, "adapters")]
    held.append(Storage(ledger, cublas_workspace(card.compute_capability), "buffers"))
    held.append(Storage(ledger, cache_numel(shape, batch.tokens + run.max_new_tokens) * item, "buffers"))
    ops = Ops(ledger, autocast_dtype=None)
    builder = Builder(run, shape, ops, fresh_gradients=False)
    with ops.no_grad():
        generation_step(ops, builder.model(batch) if keeps else builder.base_model(batch), batch)
    del held
    peak, split = ledger.take_peak()
    loading = sum(merge.values())
    return bounds(
        phases={"load": loading, "forward_backward": peak, "optimizer_step": 0, "save": 0, "evaluate": 0},
        components=max(merge, split, key=lambda parts: sum(parts.values())),
        exact=not any(by_size(run, shape)),
        card=card,
        host=PROCESS_BYTES,
        tokens=batch.tokens + run.max_new_tokens,
        remarks=(f"The prompt is {batch.tokens} tokens, the answer up to {run.max_new_tokens}.",),
    )


def _item(run: RunDescription, loaded: int) -> int:
    """Bytes of an element: float32 is turned to 16 bit unless `infer_dtype` asks for it, which an export writes."""
    wide = run.infer_dtype == "float32" and (loaded == FLOAT32 or run.export_dir is not None)
    return dtypes.size(FLOAT32 if wide else BFLOAT16)


def _adapts(run: RunDescription) -> bool:
    return bool(run.adapter_name_or_path) and run.finetuning_type in ADAPTERS


def _weights(run: RunDescription, shape: ModelShape, item: int, ledger: Ledger) -> int:
    if quantization(run, shape) is None:
        everything = statics.total(statics.model_groups(shape))
        return everything * item + statics.vision_bytes(run, shape, BFLOAT16, ledger.block)
    loaded = precision(run, shape).loaded
    return statics.base_weight_bytes(
        replace(run, finetuning_type="lora"), shape, loaded=loaded, trained=loaded, block=ledger.block
    )


def _merge_bytes(shape: ModelShape, adapters: int) -> int:
    """The update of one matrix at a time in float32, and the product that it is made of."""
    largest = max(linear.numel for linear in parameters.layer_linears(shape).values())
    return 2 * largest * dtypes.size(FLOAT32) if adapters else 0


def _export(run: RunDescription, merge: Mapping[str, int], *, tokens: int) -> MemoryEstimate:
    """A merge on the CPU needs the whole model in main memory, which `use_cpu` has stand for the card's."""
    on_card = run.export_device == "auto" and not run.use_cpu
    merging = sum(merge.values())
    peak = merging if on_card or run.use_cpu else 0
    return bounds(
        phases={"load": peak, "forward_backward": 0, "optimizer_step": 0, "save": peak, "evaluate": 0},
        components=merge if peak else {},
        exact=True,
        card=Card(),
        host=PROCESS_BYTES + (merge["weights"] if on_card else merging),
        tokens=tokens,
        remarks=(f"The merge is on the {'card' if on_card else 'CPU'}.",),
    )
