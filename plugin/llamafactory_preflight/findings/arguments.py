"""Arguments that do something else than they say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from llamafactory_preflight.memory import MemoryEstimate
from llamafactory_preflight.memory.layers.build import ADAPTERS
from llamafactory_preflight.memory.layers.checkpointing import checkpointing_kind
from llamafactory_preflight.phrases import phrase
from llamafactory_preflight.result import Finding
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.settings import is_enabled
from llamafactory_preflight.software import Software


LOW_RANK_OPTIMIZERS = {
    "use_galore": ("adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"),
    "use_apollo": ("adamw_torch",),
}
"""What LLaMA-Factory combines them with (train/trainer_utils.py); transformers' default is none of it."""


def launch(run: RunDescription, *, origin: str, num_gpus: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """LLaMA-Factory refuses DeepSpeed outside of torchrun, which it starts by itself only for several GPUs.

    The presets for several say so in their name.
    """
    forced = is_enabled(environ, "FORCE_TORCHRUN")
    inside_torchrun = "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ
    meant = re.match(r"(\d+)x\d+gb_", PurePath(origin).name)
    if meant and num_gpus < int(meant[1]) and not inside_torchrun:
        yield Finding(
            id="preset-for-more-gpus",
            severity="error" if run.deepspeed is not None and not forced else "warning",
            message=phrase(
                "This preset is for {num} GPUs, and this is what it takes on {here}. To plan for them: "
                "llamafactory-cli preflight {origin} --gpus {num}. To start it on one: "
                "FORCE_TORCHRUN=1 llamafactory-cli train {origin}",
                num=meant[1],
                here=max(1, num_gpus),
                origin=shlex.quote(origin),
            ),
        )
    elif run.deepspeed is not None and num_gpus <= 1 and not forced and not inside_torchrun:
        yield Finding(
            id="deepspeed-needs-torchrun",
            severity="error",
            message=phrase(
                "LLaMA-Factory runs DeepSpeed on one GPU only under torchrun. "
                "Start it so: FORCE_TORCHRUN=1 llamafactory-cli train {origin}",
                origin=shlex.quote(origin),
            ),
        )


def json_file(origin: str, software: Software) -> Iterator[Finding]:
    """LLaMA-Factory 0.9.5 hands a path to `json.load`, which takes an open file."""
    if origin.endswith(".json") and software.at_least("llamafactory", 0, 9, 5):
        yield Finding(
            id="json-not-read",
            severity="warning",
            message=phrase(
                "LLaMA-Factory {version} cannot read .json files. Rename it to .yaml.", version=software.llamafactory
            ),
        )


def checkpointing(run: RunDescription) -> Iterator[Finding]:
    """`gradient_checkpointing` is the Trainer's and enables it once more, with defaults, after LLaMA-Factory's own.

    Source: llamafactory/model/model_utils/checkpointing.py, transformers/trainer.py (`_inner_training_loop`).
    """
    if not run.gradient_checkpointing:
        return
    if run.disable_gradient_checkpointing:
        yield Finding(
            id="checkpointing-not-disabled",
            severity="warning",
            message="gradient_checkpointing=true turns checkpointing on again after disable_gradient_checkpointing. "
            "Leave it out to train without.",
            set={"gradient_checkpointing": False},
        )
    elif not run.use_reentrant_gc:
        yield Finding(
            id="checkpointing-reentrant",
            severity="warning",
            message="gradient_checkpointing=true makes checkpointing reentrant in spite of use_reentrant_gc=false. "
            "Leave it out: LLaMA-Factory checkpoints by itself.",
            set={"gradient_checkpointing": False},
        )


def checkpointing_of_shards(run: RunDescription, software: Software) -> Iterator[Finding]:
    """Non-reentrant checkpointing compares what it computes again, and finds frozen norms that ZeRO-3 let go.

    Source: torch/utils/checkpoint.py (`check_recomputed_tensors_match`); seen with LoRA and QLoRA under DeepSpeed
    0.18.4 on one rank and two, and mended in 0.19.3 ("Support for activation ckpt with frozen params").
    """
    section = (run.deepspeed or {}).get("zero_optimization")
    shares = isinstance(section, Mapping) and section.get("stage") == 3
    fails = software.deepspeed is not None and not software.at_least("deepspeed", 0, 19, 3)
    if shares and fails and run.finetuning_type in ADAPTERS and checkpointing_kind(run) == "non_reentrant":
        yield Finding(
            id="checkpointing-of-shards",
            severity="error",
            message="use_reentrant_gc=false fails under ZeRO-3 with adapters in the first backward (CheckpointError). "
            "Leave it out, or take DeepSpeed 0.19.3 or later.",
            set={"use_reentrant_gc": True},
        )


def evaluation(run: RunDescription, estimate: MemoryEstimate | None) -> Iterator[Finding]:
    """An evaluation with metrics keeps its predictions on the card, and its batch has a size of its own.

    Without metrics transformers keeps losses alone (`prediction_loss_only`). With them LLaMA-Factory keeps the
    likeliest token (train/sft/metric.py, `eval_logit_processor`), 8 bytes, and transformers the label, 8 more.
    """
    looks = run.do_eval or run.do_predict or run.eval_strategy != "no"
    has_metrics = run.compute_accuracy or run.predict_with_generate
    if looks and has_metrics and not run.prediction_loss_only and run.eval_accumulation_steps is None:
        yield Finding(
            id="eval-accumulates",
            severity="info",
            message="Until an evaluation ends, the predictions of the whole evaluation set stay on the card, 16 bytes "
            "for each token with its padding. eval_accumulation_steps moves them to main memory.",
            set={"eval_accumulation_steps": 10},
        )
    if estimate is None:
        return
    needs = estimate.phases.get("evaluate", 0)
    if needs > estimate.peak_allocated_bytes and run.per_device_eval_batch_size > 1:
        yield Finding(
            id="eval-batch",
            severity="info",
            message=phrase(
                "Evaluation takes more than training, {evaluation}: its batch is {batch}, and its logits are written "
                "out.",
                batch=run.per_device_eval_batch_size,
            ),
            amounts={"evaluation": needs},
            set={"per_device_eval_batch_size": 1},
        )


def experts(run: RunDescription, *, has_experts: bool, software: Software) -> Iterator[Finding]:
    """Transformers 5 stacks a layer's experts in two tensors, and bitsandbytes quantizes linear layers alone."""
    by_bitsandbytes = run.quantization_bit is not None and run.quantization_method in ("bnb", "bitsandbytes")
    if has_experts and by_bitsandbytes and software.at_least("transformers", 5):
        yield Finding(
            id="experts-not-quantized",
            severity="warning",
            message=phrase(
                "quantization_bit={bits} leaves the experts in 16 bit under transformers {version}, and they are most "
                "of the model. transformers 4 quantizes them.",
                bits=run.quantization_bit,
                version=software.transformers,
            ),
        )


def low_rank_optimizer(run: RunDescription) -> Iterator[Finding]:
    """LLaMA-Factory knows few optimizers for GaLore and APOLLO, and ends at others once the weights are loaded."""
    for name, known in LOW_RANK_OPTIMIZERS.items():
        if getattr(run, name) and run.do_train and run.optim not in known:
            yield Finding(
                id="low-rank-optimizer",
                severity="error",
                message=phrase(
                    "LLaMA-Factory combines {name} with {known} only, and `optim` is {optim}: set optim=adamw_torch.",
                    name=name,
                    known=", ".join(known),
                    optim=run.optim,
                ),
                set={"optim": "adamw_torch"},
            )


def eager_attention(run: RunDescription) -> Iterator[Finding]:
    """`disabled` means transformers' `eager`, not a kernel without FlashAttention."""
    if run.flash_attn == "disabled":
        yield Finding(
            id="eager-attention",
            severity="warning",
            message="flash_attn=disabled writes out the scores of every pair of tokens; sdpa does not, and needs no "
            "package.",
            set={"flash_attn": "sdpa"},
        )


def flash_attention_3(run: RunDescription, *, model_type: str, software: Software) -> Iterator[Finding]:
    """Up to 0.9.5 LLaMA-Factory knows `fa3` as a value and refuses it when it loads the model, after tokenization."""
    refuses = software.llamafactory is not None and not software.at_least("llamafactory", 0, 9, 6)
    if run.flash_attn == "fa3" and model_type != "gpt_oss" and refuses:
        yield Finding(
            id="fa3-refused",
            severity="error",
            message=phrase(
                "LLaMA-Factory {version} refuses flash_attn=fa3 when it loads the model.",
                version=software.llamafactory,
            ),
            set={"flash_attn": "auto"},
        )
