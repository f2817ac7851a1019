"""Which element of LLaMA-Board holds which argument, and what it can hold. Pure: it knows no gradio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


MODEL_NAME, MODEL_PATH, CHECKPOINT = "top.model_name", "top.model_path", "top.checkpoint_path"
FINETUNING, TEMPLATE, BOOSTER = "top.finetuning_type", "top.template", "top.booster"
STAGE, DATASET, PACKING = "train.training_stage", "train.dataset", "train.packing"
COMPUTE, EXTRA, OUTPUT_DIR = "train.compute_type", "train.extra_args", "train.output_dir"
CUSTOM_MODEL = "Custom"

# Arguments that an element of another name or tab holds alone; all others of `_TRAIN` are called as their element.
_ELSEWHERE = {
    "model_name_or_path": MODEL_PATH,
    "finetuning_type": FINETUNING,
    "template": TEMPLATE,
    "quantization_bit": "top.quantization_bit",
    "quantization_method": "top.quantization_method",
    "rope_scaling": "top.rope_scaling",
    "per_device_train_batch_size": "train.batch_size",
    "neftune_noise_alpha": "train.neftune_alpha",
    "pissa_init": "train.use_pissa",
    "seed": "train.train_seed",
}
_TRAIN = """
dataset dataset_dir output_dir learning_rate num_train_epochs max_grad_norm max_samples cutoff_len
gradient_accumulation_steps val_size lr_scheduler_type logging_steps save_steps warmup_steps packing neat_packing
train_on_prompt mask_history resize_vocab use_llama_pro enable_thinking report_to freeze_trainable_layers
freeze_trainable_modules freeze_extra_modules lora_rank lora_alpha lora_dropout loraplus_lr_ratio create_new_adapter
use_rslora use_dora lora_target additional_target pref_beta pref_ftx pref_loss ppo_score_norm ppo_whiten_rewards
freeze_vision_tower freeze_multi_modal_projector freeze_language_model image_max_pixels image_min_pixels
video_max_pixels video_min_pixels use_galore galore_rank galore_update_interval galore_scale galore_target use_apollo
apollo_rank apollo_update_interval apollo_scale apollo_target use_badam badam_mode badam_switch_mode
badam_switch_interval badam_update_ratio use_swanlab swanlab_project swanlab_run_name swanlab_workspace swanlab_mode
""".split()
ELEMENTS: Mapping[str, str] = {name: f"train.{name}" for name in _TRAIN} | _ELSEWHERE

# Arguments that share an element: the element's choice, and the arguments that it stands for.
COMPUTE_TYPES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"bf16": True, "fp16": False, "pure_bf16": False},
    "fp16": {"bf16": False, "fp16": True, "pure_bf16": False},
    "pure_bf16": {"bf16": False, "fp16": False, "pure_bf16": True},
    "fp32": {"bf16": False, "fp16": False, "pure_bf16": False},
}
BOOSTERS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"flash_attn": "auto", "use_unsloth": False, "enable_liger_kernel": False},
    "flashattn2": {"flash_attn": "fa2", "use_unsloth": False, "enable_liger_kernel": False},
    "unsloth": {"flash_attn": "auto", "use_unsloth": True, "enable_liger_kernel": False},
    "liger_kernel": {"flash_attn": "auto", "use_unsloth": False, "enable_liger_kernel": True},
}

# What the board writes for an evaluation or a quantized base, after the extra arguments: where one of them is wanted
# otherwise, the element is set to nothing and all of them go to the extra arguments.
GROUPS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "train.val_size": (0, ("val_size", "eval_strategy", "eval_steps", "per_device_eval_batch_size")),
    "top.quantization_bit": ("none", ("quantization_bit", "quantization_method", "double_quantization")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """What one element of the board can hold.

    Attributes:
        kind: How it is shown.
        value: What it holds on a new page.
        minimum: Smallest number of a slider.
        maximum: Largest number of a slider.
        whole: Whether a slider moves by whole numbers.
        choices: The entries of a menu.
        custom: Whether a menu takes other values too.
        several: Whether a menu holds a list.
    """

    kind: Literal["text", "menu", "slider", "checkbox"]
    value: Any = None
    minimum: float = 0
    maximum: float = 0
    whole: bool = False
    choices: tuple[Any, ...] = ()
    custom: bool = False
    several: bool = False

    def shown(self, value: Any) -> tuple[Any] | None:
        """The value as this element holds it, in a tuple; None where it cannot hold it."""
        if self.kind == "checkbox":
            return (bool(value),) if isinstance(value, bool) or value is None else None
        if self.kind == "slider":
            return self._number(0 if value is None else value)
        if self.kind == "menu":
            return self._choice(value)
        if value is None:
            return None if self.value else ("",)
        return (",".join(map(str, value)) if isinstance(value, list) else str(value),)

    def _number(self, value: Any) -> tuple[Any] | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not self.minimum <= value <= self.maximum or (self.whole and value != int(value)):
            return None
        return (int(value),) if self.whole else (value,)

    def _choice(self, value: Any) -> tuple[Any] | None:
        if self.several:
            items = value.split(",") if isinstance(value, str) else value or []
            return ([str(item).strip() for item in items],)
        shown = "none" if value is None and "none" in self.choices else str(value)
        return (shown,) if self.custom or shown in self.choices else None


def same(one: Any, other: Any) -> bool:
    """Whether LLaMA-Factory would read two values as the same: numbers by value, lists also as text with commas."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, dict) or isinstance(other, dict):
        return bool(one == other)
    texts = [",".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item) for item in (one, other)]
    if texts[0] == texts[1]:
        return True
    try:
        return float(texts[0]) == float(texts[1])
    except ValueError:
        return [part.strip() for part in texts[0].split(",")] == [part.strip() for part in texts[1].split(",")]


def standing_for(table: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """The choice of a shared element that stands for the most of the arguments; what it does not is left over."""
    return max(
        table,
        key=lambda choice: sum(same(value, arguments.get(name, value)) for name, value in table[choice].items()),
    )
