"""Every argument of LLaMA-Factory that no formula reads: judged to leave memory alone, or known to change it.

`RunDescription` holds what the formulas read. A test goes through the arguments of the installed LLaMA-Factory and
fails for one that stands nowhere; a run that sets one that nobody has judged (a newer version has more) is `unknown`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


WITHOUT_FORMULA: Mapping[str, tuple[Any, ...]] = {
    # These change what is allocated; the values beside them do not.
    "accelerator_config": (None, {}),  # may split a batch over processes
    "add_special_tokens": (None, ""),  # resizes the vocabulary
    "add_tokens": (None, ""),
    "apollo_proj": ("random",),
    "apollo_proj_type": ("std",),
    "auto_find_batch_size": (False,),  # halves the batch until it fits
    "eval_num_beams": (None, 1),
    "export_quantization_bit": (None,),
    "galore_proj_type": ("std",),
    "generation_num_beams": (None, 1),
    "gradient_checkpointing_kwargs": (None, {}),  # goes round use_reentrant_gc
    "hyper_parallel_args": (None, {}),
    "liger_kernel_config": (None, {}),
    "module_dropout": (0.0,),
    "moe_aux_loss_coef": (None, 0.0),  # keeps the router's choices of all layers
    "new_special_tokens_config": (None,),
    "num_beams": (1,),
    "optim_args": (None, ""),
    "parallelism_config": (None,),
    "quantization_device_map": (None,),
    "ref_model_adapters": (None,),
    "ref_model_quantization_bit": (None,),
    "torch_compile_backend": (None, ""),  # turns compilation on
    "torch_compile_mode": (None, ""),
    "use_liger_kernel": (False,),  # transformers' own way beside enable_liger_kernel
}  # fmt: skip

WITHOUT_EFFECT = frozenset(
    {
        # What is learned, and how fast.
        "adam_beta1", "adam_beta2", "adam_epsilon", "apollo_scale", "apollo_scale_front", "apollo_scale_type",
        "apollo_update_interval", "asft_alpha", "average_tokens_across_devices", "badam_mask_mode",
        "badam_verbose", "dpo_label_smoothing",
        "eaft_alpha", "early_stopping_steps", "galore_scale", "galore_update_interval", "init_special_tokens",
        "kto_chosen_weight", "kto_rejected_weight", "learning_rate", "ld_alpha", "lora_alpha", "loraplus_lr_embedding",
        "lr_scheduler_kwargs", "lr_scheduler_type", "pissa_iter", "ppo_epochs", "ppo_score_norm",
        "ppo_target", "ppo_whiten_rewards", "pref_bco_weight", "pref_beta", "simpo_gamma", "train_on_prompt",
        "use_rslora", "warmup_ratio", "warmup_steps", "weight_decay",
        # The data: what is in a sample, in which order, and where it comes from.
        "buffer_size", "data_seed", "data_shared_file_system", "dataloader_drop_last", "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor", "default_system", "disable_shuffling", "enable_thinking", "ignore_data_skip",
        "ignore_pad_token_for_loss", "interleave_probs", "label_names", "length_column_name", "mask_history",
        "media_dir", "mix_strategy", "overwrite_cache", "preprocessing_batch_size",
        "preserve_thinking", "remove_unused_columns", "seed", "sortish_sampler", "split_special_tokens",
        "tool_format", "train_sampling_strategy", "use_fast_tokenizer",
        # Videos and sound, with which a run is `unknown`; and how small an image may be, where the largest counts.
        "audio_sampling_rate", "crop_to_patches", "image_do_pan_and_scan", "image_min_pixels",
        "use_audio_in_video", "video_fps", "video_max_pixels", "video_maxlen", "video_min_pixels",
        # Evaluation: the formula takes the batch of one step, and the loss alone is gathered.
        "batch_eval_metrics", "eval_delay", "eval_do_concat_batches", "eval_on_each_dataset",
        "eval_on_start", "eval_steps", "eval_use_gather_object", "generation_config",
        "greater_is_better", "include_for_metrics", "load_best_model_at_end", "metric_for_best_model",
        # Words, files, logs and services.
        "debug", "disable_tqdm", "enable_jit_checkpoint", "enable_torch_profiler", "export_hub_model_id",
        "export_legacy_format", "export_quantization_dataset", "export_quantization_maxlen",
        "export_quantization_nsamples", "export_size", "hf_hub_token", "hub_always_push", "hub_model_id",
        "hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "include_effective_tokens_per_second",
        "include_num_input_tokens_seen", "log_level", "log_level_replica", "log_on_each_node", "logging_dir",
        "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy", "ms_hub_token",
        "offload_folder", "om_hub_token", "overwrite_output_dir", "pissa_convert", "plot_loss", "print_param_status",
        "profile_modules", "profiler_active_steps", "profiler_output_dir", "profiler_profile_memory",
        "profiler_record_shapes", "profiler_repeat", "profiler_wait_steps", "profiler_warmup_steps",
        "profiler_with_stack", "project", "push_to_hub", "restore_callback_states_from_checkpoint",
        "run_name", "save_on_each_node", "skip_memory_metrics", "swanlab_api_key",
        "swanlab_lark_secret", "swanlab_lark_webhook_url", "swanlab_logdir", "swanlab_mode", "swanlab_project",
        "swanlab_run_name", "swanlab_workspace", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
        "use_swanlab",
        # The allocator's cache and the arithmetic: the peak of what is allocated stays.
        "full_determinism", "low_cpu_mem_usage", "quantization_type", "rope_scaling", "tf32",
        "torch_empty_cache_steps", "trust_remote_code",
        # Sampling.
        "do_sample", "generation_max_length", "length_penalty", "max_length", "repetition_penalty",
        "skip_special_tokens", "temperature", "top_k", "top_p", "use_cache", "use_kv_cache",
        # Read only under a switch that is `unknown` itself: PPO, BAdam by ratio, fp8, FSDP, KTransformers,
        # other engines, Ray.
        "badam_update_ratio", "fp8_backend", "fp8_enable_fsdp_float8_all_gather",
        "kt_expert_checkpoint_path", "kt_lora_expert_intermediate_size", "kt_lora_expert_num", "kt_use_lora_experts",
        "kt_weight_path", "oft_target", "optim_target_modules", "ppo_buffer_size", "ray_init_kwargs",
        "ray_num_workers", "reward_model",
        "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type", "sglang_config",
        "sglang_lora_backend", "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "vllm_config",
        "vllm_enforce_eager", "vllm_gpu_util", "vllm_max_lora_rank", "vllm_maxlen",
        # How processes meet.
        "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
        "ddp_timeout", "local_rank", "master_addr", "master_port",
    }
)  # fmt: skip


def unmodelled(arguments: Mapping[str, Any], *, read: Collection[str]) -> Iterator[str]:
    """The keys that may change memory in a way that no formula knows.

    Args:
        arguments: What a run sets.
        read: The arguments that formulas read.
    """
    for key, value in arguments.items():
        if key in read or key in WITHOUT_EFFECT:
            continue
        harmless = WITHOUT_FORMULA.get(key)
        if harmless is None or value not in harmless:
            yield key
