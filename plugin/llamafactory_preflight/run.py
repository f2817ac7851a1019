"""The arguments that decide memory, as one frozen description of a run.

Field names and defaults are LLaMA-Factory's own (a test compares them with the installed version), so that a remedy is
`dataclasses.replace(run, **{"cutoff_len": 1024})` and prints as `cutoff_len=1024`. No other module knows these names
as text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from llamafactory_preflight.arguments import judged, schema
from llamafactory_preflight.arguments import values as argument_values
from llamafactory_preflight.errors import Refused, UserError
from llamafactory_preflight.parallel import fsdp
from llamafactory_preflight.parallel.fsdp import FsdpPlan
from llamafactory_preflight.phrases import joined, phrase
from llamafactory_preflight.software import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """One training run, as LLaMA-Factory will see it after parsing; no model or machine facts.

    Comma-separated lists of LLaMA-Factory are tuples here. `deepspeed` is the parsed JSON, whatever way it was given.
    """

    # model
    model_name_or_path: str | None = None
    adapter_name_or_path: tuple[str, ...] = ()
    adapter_folder: str | None = None
    model_revision: str = "main"
    cache_dir: str | None = None
    resize_vocab: bool = False
    flash_attn: str = "auto"
    shift_attn: bool = False
    mixture_of_depths: str | None = None
    use_unsloth: bool = False
    use_unsloth_gc: bool = False
    enable_liger_kernel: bool = False
    disable_gradient_checkpointing: bool = False
    use_reentrant_gc: bool = True
    upcast_layernorm: bool = False
    upcast_lmhead_output: bool = False
    train_from_scratch: bool = False
    infer_dtype: str = "auto"
    use_v1_kernels: bool | None = False
    use_kt: bool = False
    quantization_method: str = "bnb"
    quantization_bit: int | None = None
    double_quantization: bool = True
    # data
    template: str | None = None
    dataset: tuple[str, ...] = ()
    eval_dataset: tuple[str, ...] = ()
    dataset_dir: str = "data"
    tokenized_path: str | None = None
    cutoff_len: int = 2048
    packing: bool | None = None
    neat_packing: bool = False
    streaming: bool = False
    val_size: float = 0.0
    preprocessing_num_workers: int | None = None
    max_samples: int | None = None
    image_max_pixels: int = 768 * 768
    # method
    stage: str = "sft"
    finetuning_type: str = "lora"
    pure_bf16: bool = False
    freeze_trainable_layers: int = 2
    freeze_trainable_modules: tuple[str, ...] = ("all",)
    freeze_extra_modules: tuple[str, ...] = ()
    additional_target: tuple[str, ...] = ()
    lora_rank: int = 8
    lora_target: tuple[str, ...] = ("all",)
    lora_dropout: float = 0.0
    use_dora: bool = False
    pissa_init: bool = False
    create_new_adapter: bool = False
    oft_rank: int = 0
    oft_block_size: int = 32
    use_llama_pro: bool = False
    freeze_vision_tower: bool = True
    freeze_multi_modal_projector: bool = True
    freeze_language_model: bool = False
    use_dft_loss: bool = False
    use_asft_loss: bool = False
    use_eaft_loss: bool = False
    compute_accuracy: bool = False
    # preference and reinforcement stages
    pref_loss: str = "sigmoid"
    pref_ftx: float = 0.0
    ref_model: str | None = None
    max_new_tokens: int = 1024
    # optimizer
    optim: str | None = None
    max_grad_norm: float = 1.0
    use_galore: bool = False
    galore_target: tuple[str, ...] = ("all",)
    galore_rank: int = 16
    galore_layerwise: bool = False
    use_apollo: bool = False
    apollo_target: tuple[str, ...] = ("all",)
    apollo_rank: int = 16
    apollo_layerwise: bool = False
    loraplus_lr_ratio: float | None = None
    use_badam: bool = False
    badam_mode: str = "layer"
    badam_switch_mode: str | None = "ascending"
    badam_switch_interval: int | None = 50
    badam_start_block: int | None = None
    use_adam_mini: bool = False
    use_muon: bool = False
    # loop
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    predict_with_generate: bool = False
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    bf16: bool = False
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    fp8: bool = False
    torch_compile: bool = False
    neftune_noise_alpha: float | None = None
    label_smoothing_factor: float = 0.0
    eval_strategy: str = "no"
    eval_accumulation_steps: int | None = None
    prediction_loss_only: bool = False
    dataloader_num_workers: int = 0
    use_cpu: bool = False
    # saving
    output_dir: str | None = None
    resume_from_checkpoint: str | bool | None = None
    report_to: tuple[str, ...] = ("none",)
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    max_steps: int = -1
    num_train_epochs: float = 3.0
    # distribution and engines that are not modelled
    deepspeed: dict[str, Any] | None = None
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | None = None
    use_mca: bool = False
    use_hyper_parallel: bool = False
    # inference and export
    export_dir: str | None = None
    export_device: str = "cpu"
    infer_backend: str = "huggingface"
    # arguments that are set and may change memory in a way that no formula knows
    unmodelled: tuple[str, ...] = ()
    # how the processes are launched: what `accelerate launch` says of FSDP in their environment
    accelerate: Mapping[str, str] | None = None

    @property
    def fsdp_plan(self) -> FsdpPlan | None:
        """FSDP as the arguments or the launcher ask for it."""
        return fsdp.plan(self.fsdp, self.fsdp_config, self.accelerate)

    @property
    def serves(self) -> bool:
        """Whether the arguments are those of `chat`, `api` or `export` and not of a training or an evaluation."""
        works = self.do_train or self.do_eval or self.do_predict
        return self.export_dir is not None or not (works or self.dataset or self.output_dir)

    @property
    def merges_on_cpu(self) -> bool:
        """Whether the arguments are those of an export that merges in main memory."""
        return self.export_dir is not None and self.export_device == "cpu"


OTHER_FILES = {
    "distributed_type": "This is a configuration of accelerate, not the arguments of a run",
    "model": "These are arguments of LLaMA-Factory v1 (USE_V1=1), which has no formula yet",
    "tensor_model_parallel_size": "These are arguments of Megatron (USE_MCA=1), which has no formula yet",
}
"""Keys that tell what a file is that LLaMA-Factory's usual parser refuses."""
OURS = frozenset({"unmodelled", "accelerate"})
"""Fields that are no arguments."""


def from_arguments(
    arguments: Mapping[str, Any],
    *,
    software: Software,
    origin: str,
    overridden: Collection[str] = (),
    allow_extra: bool = False,
) -> RunDescription:
    """Describes the run that LLaMA-Factory would start with these arguments.

    Args:
        arguments: Keys and values as `arguments.read` returns them.
        software: Installed versions; they decide a few defaults.
        origin: What to call the source in messages, usually the file's name.
        overridden: Names of those that stood on the command line beside that source.
        allow_extra: Whether unknown keys are legal, as under `ALLOW_EXTRA_ARGS=1`.

    Raises:
        UserError: One message with every unknown key, wrong type and unreadable DeepSpeed JSON.
    """
    known = schema.load()
    problems = dict(known.problems(arguments, allow_extra=allow_extra)) if known else {}
    for key in OTHER_FILES.keys() & problems.keys():
        raise UserError(OTHER_FILES[key], where=origin)
    values: dict[str, Any] = {}
    read = [field for field in fields(RunDescription) if field.name not in OURS]
    for field in read:
        if field.name not in arguments or field.name in problems:
            continue
        try:
            values[field.name] = argument_values.converted(field.name, str(field.type), arguments[field.name])
        except UserError as problem:
            problems[field.name] = problem
    if not arguments.get("model_name_or_path"):
        problems["model_name_or_path"] = UserError("`model_name_or_path` is missing")
    if problems:
        raise _together(problems, origin, overridden)
    values |= dict(_implied(values, software=software, known=known))
    # LLaMA-Factory drops what it does not know, where it is told to allow that.
    taken = {key: value for key, value in arguments.items() if known is None or key in known.arguments}
    values["unmodelled"] = tuple(judged.unmodelled(taken, read={field.name for field in read}))
    return RunDescription(**values)


def _implied(
    values: Mapping[str, Any], *, software: Software, known: schema.Schema | None
) -> Iterator[tuple[str, Any]]:
    """What LLaMA-Factory and transformers set after parsing, where it bears on memory."""
    if values.get("optim") is None:
        defaults = known.arguments["optim"].defaults if known and "optim" in known.arguments else ()
        # transformers prefers the fused optimizer from torch 2.8 on, if it knows of that preference at all.
        fused = "adamw_torch_fused" in defaults and software.at_least("torch", 2, 8)
        yield "optim", "adamw_torch_fused" if fused else "adamw_torch"
    if values.get("neat_packing"):
        yield "packing", True
    elif values.get("packing") is None or values.get("stage", "sft") not in ("pt", "sft"):
        yield "packing", values.get("stage", "sft") == "pt"  # pairs are never packed, whatever is asked for
    if values.get("eval_strategy", "no") != "no":
        yield "do_eval", True


def _together(problems: Mapping[str, UserError], origin: str, overridden: Collection[str]) -> UserError:
    kind = Refused if any(isinstance(problem, Refused) for problem in problems.values()) else UserError
    given = [key in overridden for key in problems]
    source = "the command line" if all(given) else origin
    parts = [
        _placed(problem, "the command line") if beside and not all(given) else problem
        for problem, beside in zip(problems.values(), given, strict=True)
    ]
    if len(parts) == 1:
        placed = _placed(parts[0], source)
        return kind(placed.what, where=placed.where, next_step=placed.next_step)
    what = phrase("{num} arguments in {origin} need attention", num=len(parts), origin=source)
    return kind(what, parts=parts)


def _placed(problem: UserError, source: str) -> UserError:
    where = joined(", ", (part for part in (source, problem.where) if part))
    return UserError(problem.what, where=where, next_step=problem.next_step)
