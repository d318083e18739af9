"""Known keys of other stacks' files: those that are read, and those that no plan depends on."""

from __future__ import annotations

from shardwise.stacks.read import fsdp1

ACCELERATE = (
    # Read.
    "distributed_type", "mixed_precision", "num_machines", "num_processes", "use_cpu",
    "fsdp_config", "parallelism_config", "deepspeed_config", "dynamo_config",
    "gradient_accumulation_steps",
    # About how and where processes are started.
    "compute_environment", "debug", "machine_rank", "gpu_ids", "main_process_ip",
    "main_process_port", "rdzv_backend", "same_network", "main_training_function",
    "enable_cpu_affinity", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "command_file", "commands",
    "fp8_config", "megatron_lm_config",
)  # fmt: skip
FSDP = (
    "version", "reshard_after_forward", "sharding_strategy", "offload_params",
    "activation_checkpointing", "backward_prefetch", "forward_prefetch", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "min_num_params", "ignored_modules", *fsdp1.OBSOLETE,
    # About loading and saving.
    "state_dict_type", "cpu_ram_efficient_loading",
)  # fmt: skip
PARALLELISM = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_backend",
    "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
    "sp_attn_implementation",
)  # fmt: skip
ACCELERATE_DEEPSPEED = (
    "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
    "offload_param_device", "deepspeed_config_file",
    # About starting, loading and saving.
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag",
    "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
DYNAMO = ("backend", "use_regional_compilation", "mode", "use_dynamic", "use_fullgraph")

# Keys of a DeepSpeed JSON that no plan depends on, by table inside it; rows name the others.
DEEPSPEED: dict[str, tuple[str, ...]] = {
    "": (
        # About what is printed, written down and checked.
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
        "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet",
        "checkpoint", "elasticity", "autotuning", "aio", "nebula", "dataloader_drop_last",
        "disable_python_gc", "zero_force_ds_cpu_optimizer", "seq_parallel_communication_data_type",
        "use_node_local_storage", "vocabulary_size", "managed_gradient_accumulation",
        "use_data_before_expert_parallelism", "disable_allgather",
    ),
    "zero_optimization": (
        # Bucket sizes and orders: Shardwise gathers by FSDP unit instead.
        "allgather_bucket_size", "allgather_partitions", "reduce_bucket_size", "sub_group_size",
        "round_robin_gradients", "stage3_model_persistence_threshold", "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "use_multi_rank_bucket_allreduce",
        "memory_efficient_linear", "leaf_module", "mics_hierarchical_params_gather",
        "parameter_alignment",
        # About loading, saving and checking.
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "cpu_offload_use_pin_memory", "elastic_checkpoint", "load_from_fp32_weights",
        "ignore_unused_parameters", "legacy_stage1", "override_module_apply", "compute_grad_norm",
        "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    ),
    **dict.fromkeys(
        ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
        ("pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "ratio",
         "fast_init", "pipeline", "pipeline_read", "pipeline_write", "cpuadam_cores_perc",
         "super_offload"),
    ),
    **dict.fromkeys(
        ("bf16", "bfloat16", "fp16", "torch_autocast"),
        # About the scale of the loss and about checks.
        ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
         "consecutive_hysteresis", "min_loss_scale", "check_grad_overflow",
         "immediate_grad_update", "lower_precision_safe_modules"),
    ),
    "tensor_parallel": ("tp_overlap_comm", "tp", "tensor_parallel", "preset_model",
                        "partition_config", "dtype"),
}  # fmt: skip

TRAINER = (
    # Read, or listed as unsupported.
    "accelerator_config", "adam_beta1", "adam_beta2", "adam_epsilon", "auto_find_batch_size",
    "bf16", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "deepspeed", "fp16", "fsdp",
    "fsdp_config", "gradient_accumulation_steps", "gradient_checkpointing",
    "label_smoothing_factor", "learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type",
    "max_grad_norm", "max_steps", "neftune_noise_alpha", "num_train_epochs", "optim", "optim_args",
    "parallelism_config", "per_device_train_batch_size", "torch_compile", "use_liger_kernel",
    "warmup_ratio", "warmup_steps", "weight_decay",
    # About data, evaluation, logging and saving.
    "average_tokens_across_devices", "batch_eval_metrics", "bf16_full_eval", "data_seed",
    "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "disable_tqdm", "do_eval", "do_predict", "do_train",
    "enable_jit_checkpoint", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches",
    "eval_on_start", "eval_steps", "eval_strategy", "eval_use_gather_object",
    "evaluation_strategy", "fp16_full_eval", "greater_is_better", "group_by_length",
    "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy",
    "hub_token", "ignore_data_skip", "include_for_metrics", "include_num_input_tokens_seen",
    "include_tokens_per_second", "label_names", "length_column_name", "load_best_model_at_end",
    "log_level", "log_level_replica", "log_on_each_node", "logging_dir", "logging_first_step",
    "logging_nan_inf_filter", "logging_steps", "logging_strategy", "metric_for_best_model",
    "output_dir", "overwrite_output_dir", "past_index", "per_device_eval_batch_size",
    "prediction_loss_only", "project", "push_to_hub", "remove_unused_columns", "report_to",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name",
    "save_on_each_node", "save_only_model", "save_safetensors", "save_steps", "save_strategy",
    "save_total_limit", "seed", "skip_memory_metrics", "trackio_bucket_id", "trackio_space_id",
    "trackio_static_space_id", "train_sampling_strategy", "use_cache",
    # About how it is started and what runs it.
    "ddp_backend", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_timeout", "debug",
    "full_determinism", "gradient_checkpointing_kwargs", "liger_kernel_config", "local_rank",
    "no_cuda", "optim_target_modules", "tf32", "torch_compile_backend", "torch_compile_mode",
    "torch_empty_cache_steps", "use_cpu", "use_mps_device",
)  # fmt: skip
# fsdp_config of TrainingArguments: accelerate's keys and these.
TRAINER_FSDP = (*FSDP, "cpu_offload", "xla", "xla_fsdp_v2", "xla_fsdp_settings",
                "xla_fsdp_grad_ckpt")  # fmt: skip
# SFTConfig, ScriptArguments and ModelConfig of TRL, which share a file with TrainingArguments.
TRL = (
    # Read, or listed as unsupported.
    "max_length", "max_seq_length", "use_peft", "load_in_4bit", "load_in_8bit",
    "activation_offloading", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
    "lora_modules_to_save", "lora_target_parameters", "use_rslora", "use_dora", "dtype",
    "torch_dtype", "bnb_4bit_quant_type", "use_bnb_nested_quant", "packing", "env",
    # About data and tokenizers.
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "dataset_streaming", "dataset_num_proc", "dataset_text_field", "dataset_kwargs", "datasets",
    "eos_token", "pad_token", "pad_to_multiple_of", "packing_strategy", "padding_free",
    "streaming", "test_split_size", "truncation_mode",
    "eval_packing", "completion_only_loss", "assistant_only_loss", "shuffle_dataset",
    "chat_template_path", "ignore_bias_buffers", "loss_type",
    # About the model.
    "model_name_or_path", "model_revision", "model_init_kwargs", "attn_implementation",
    "trust_remote_code", "lora_task_type", "bnb_4bit_quant_storage", "router_aux_loss_coef",
    # About how `trl sft` starts it.
    "accelerate_config", "num_processes", "num_machines",
)  # fmt: skip
# Keys that show that a file is TRL's and not only TrainingArguments.
TRL_ONLY = ("max_length", "packing", "packing_strategy", "use_peft", "lora_r", "padding_free",
            "dataset_train_split", "completion_only_loss", "assistant_only_loss",
            "lora_target_modules")  # fmt: skip

AXOLOTL = (
    # Read by code, or listed as unsupported; rows name their own keys.
    "base_model", "batch_size", "sample_packing", "adapter", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "lora_target_linear", "lora_modules_to_save", "peft_use_dora",
    "peft_use_rslora", "load_in_4bit", "load_in_8bit", "unfrozen_parameters", "bf16", "fp16",
    "bfloat16", "float16", "gradient_checkpointing", "fsdp", "fsdp_config", "fsdp_version",
    "deepspeed", "dp_shard_size", "dp_replicate_size", "tensor_parallel_size",
    "context_parallel_size", "context_parallel", "sequence_parallel_degree", "bnb_config_kwargs",
    "rl", "expert_parallel_size",
    # About data and tokenizers.
    "datasets", "test_datasets", "pretraining_dataset", "dataset_prepared_path",
    "dataset_keep_in_memory", "dataset_num_proc", "dataset_processes", "dataset_shard_num",
    "dataset_shard_idx", "dataset_exact_deduplication", "dataset_config", "val_set_size",
    "shuffle_merged_datasets", "shuffle_before_merging_datasets", "skip_prepare_dataset",
    "pad_to_sequence_len", "eval_sample_packing", "min_sample_len", "train_on_inputs",
    "group_by_length", "chat_template", "chat_template_jinja", "chat_template_kwargs",
    "default_system_message", "special_tokens", "tokens", "added_tokens_overrides", "eot_tokens",
    "tokenizer_type", "tokenizer_config", "tokenizer_use_fast", "tokenizer_legacy",
    "tokenizer_use_mistral_common", "tokenizer_save_jinja_files", "processor_type",
    "remove_unused_columns", "streaming", "streaming_multipack_buffer_size",
    "pretrain_multipack_attn", "pretrain_multipack_buffer_size", "sample_packing_group_size",
    "sample_packing_bin_size", "sample_packing_sequentially", "curriculum_sampling",
    "excess_length_strategy", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "dataloader_drop_last", "resize_token_embeddings_to_32x",
    "shrink_embeddings", "image_size", "image_resize_algorithm",
    # About the model and where it comes from.
    "base_model_config", "cls_model_config", "base_model_ignore_patterns", "model_type",
    "model_config", "model_config_type", "revision_of_model", "trust_remote_code",
    "overrides_of_model_config", "overrides_of_model_kwargs", "is_falcon_derived_model",
    "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model",
    "attn_implementation", "flash_attention", "sdp_attention", "xformers_attention",
    "flex_attention", "eager_attention", "sage_attention", "s2_attention", "tf32",
    "low_cpu_mem_usage", "device_map", "max_memory", "hf_use_auth_token", "lora_model_dir",
    "lora_on_cpu", "qlora_sharded_model_loading", "gradient_checkpointing_kwargs",
    "lora_fan_in_fan_out", "experimental_skip_move_to_device", "use_kernels", "torch_dtype",
    # About evaluation, logging, saving and starting.
    "num_epochs", "output_dir", "logging_steps", "logging_strategy", "save_steps",
    "save_strategy", "saves_per_epoch", "save_total_limit", "save_only_model", "save_safetensors",
    "save_first_step", "evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy",
    "eval_batch_size", "eval_table_size", "eval_max_new_tokens", "eval_causal_lm_metrics",
    "do_causal_lm_eval", "do_bench_eval", "early_stopping_patience", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "loss_watchdog_threshold",
    "loss_watchdog_patience", "resume_from_checkpoint", "auto_resume_from_checkpoints",
    "hub_model_id", "hub_strategy", "push_dataset_to_hub", "wandb_project", "wandb_entity",
    "wandb_watch", "wandb_name", "wandb_run_id", "wandb_log_model", "use_wandb", "wandb_mode",
    "use_tensorboard", "use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name",
    "use_comet", "use_swanlab", "use_trackio", "include_tokens_per_second", "strict", "debug",
    "profiler_steps", "gc_steps", "ddp", "ddp_timeout", "ddp_broadcast_buffers", "world_size",
    "local_rank", "use_ray", "ray_num_workers", "resources_per_worker", "axolotl_config_path",
    "torch_compile_mode", "torch_compile_backend", "flex_attn_compile_kwargs",
)  # fmt: skip
# fsdp_config of axolotl: accelerate's keys and these.
AXOLOTL_FSDP = (*FSDP, "cpu_offload_pin_memory", "final_state_dict_type", "mixed_precision_policy")

# LLaMA-Factory, in addition to TrainingArguments.
LLAMA_FACTORY = (
    # Read, or listed as unsupported.
    "stage", "finetuning_type", "cutoff_len", "packing", "neat_packing", "lora_rank", "lora_alpha",
    "lora_dropout", "lora_target", "use_rslora", "use_dora", "additional_target",
    "quantization_bit", "quantization_method", "quantization_type", "double_quantization",
    "disable_gradient_checkpointing", "pure_bf16", "freeze_trainable_layers",
    "freeze_trainable_modules", "freeze_extra_modules", "use_muon",
    # About data.
    "template", "dataset", "eval_dataset", "dataset_dir", "media_dir", "train_on_prompt",
    "mask_history", "streaming", "buffer_size", "mix_strategy", "interleave_probs",
    "overwrite_cache", "preprocessing_batch_size", "preprocessing_num_workers", "max_samples",
    "eval_num_beams", "ignore_pad_token_for_loss", "val_size", "eval_on_each_dataset",
    "tool_format", "default_system", "enable_thinking", "preserve_thinking", "tokenized_path",
    "data_shared_file_system", "disable_shuffling", "image_max_pixels", "image_min_pixels",
    "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen", "audio_sampling_rate",
    # About the model and where it comes from.
    "model_name_or_path", "adapter_name_or_path", "create_new_adapter", "cache_dir",
    "use_fast_tokenizer", "resize_vocab", "split_special_tokens", "add_tokens",
    "add_special_tokens", "model_revision", "low_cpu_mem_usage", "rope_scaling", "flash_attn",
    "trust_remote_code", "use_v1_kernels", "use_reentrant_gc", "hf_hub_token", "ms_hub_token",
    "om_hub_token", "freeze_vision_tower", "freeze_multi_modal_projector",
    "quantization_device_map", "predict_with_generate",
    # About evaluation, logging and starting.
    "plot_loss", "compute_accuracy", "early_stopping_steps", "print_param_status",
    "include_effective_tokens_per_second", "use_swanlab", "swanlab_project",
    "swanlab_run_name", "swanlab_mode", "ray_run_name", "ray_storage_path",
    "ray_num_workers", "resources_per_worker", "placement_strategy", "ray_init_kwargs",
    "master_addr", "master_port", "max_new_tokens", "top_p", "temperature",
)  # fmt: skip
