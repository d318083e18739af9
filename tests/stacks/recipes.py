"""Inputs as people write them, for the stacks whose recipes an import keeps."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """One file: the stack, its name, its text, and the table that the stack makes of it."""

    stack: str
    file: str
    text: str
    table: dict[str, Any]
    # The class of TRL or transformers that the table is given to.
    config: str = ""
    cluster: str = "8xH100-SXM"


def script(config: str, table: dict[str, Any], more: str = "", model: str = "llama-3-8b") -> Recipe:
    """A script that gives the table to a config of TRL, or to TrainingArguments."""
    library = "transformers" if config == "TrainingArguments" else "trl"
    trainer = {"SFTConfig": "SFTTrainer", "DPOConfig": "DPOTrainer"}.get(config, "Trainer")
    arguments = "".join(f"    {key}={value!r},\n" for key, value in table.items())
    text = (
        f"import torch\nfrom datasets import load_dataset\nfrom peft import LoraConfig\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig\n"
        f"from {library} import {config}\nfrom {library} import {trainer}\n\n"
        f'model_id = "{model}"\ntokenizer = AutoTokenizer.from_pretrained(model_id)\n'
        f"dataset = load_dataset('org/data', split='train')\n{more}"
        f"args = {config}(\n{arguments})\n"
        f"trainer = {trainer}(model=model_id, args=args, train_dataset=dataset)\ntrainer.train()\n"
    )
    stack = "trainer" if config == "TrainingArguments" else "trl"
    return Recipe(stack, "train.py", text, table, config)


def table(stack: str, file: str, values: dict[str, Any], config: str = "", **more: Any) -> Recipe:
    """A YAML or JSON; JSON is YAML too."""
    return Recipe(stack, file, json.dumps(values, indent=1), values, config, **more)


BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
LORA = 'lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")\n'
QLORA = (
    LORA + 'four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",\n'
    "    bnb_4bit_use_double_quant=True)\n"
)
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True,
                                      "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}  # fmt: skip
FSDP_LATE = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False,
                                           "activation_checkpointing": True,
                                           "auto_wrap_policy":
                                           "TRANSFORMER_BASED_WRAP"}}  # fmt: skip
PEFT = {"use_peft": True, "lora_r": 32, "lora_alpha": 16, "lora_target_modules": ["q_proj",
        "v_proj"]}  # fmt: skip
AXOLOTL = {"base_model": "llama-3-8b", "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
           "output_dir": "./out", "learning_rate": 2e-4, "micro_batch_size": 2,
           "gradient_accumulation_steps": 4, "sequence_len": 2048, "bf16": True}  # fmt: skip
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
                "lora_target_linear": True}  # fmt: skip
AXOLOTL_FSDP = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type":
                "FULL_STATE_DICT", "transformer_layer_cls_to_wrap":
                "LlamaDecoderLayer"}}  # fmt: skip
FACTORY = {"model_name_or_path": "llama-3-8b", "stage": "sft", "do_train": True,
           "dataset": "identity,alpaca_en_demo", "template": "llama3", "cutoff_len": 2048,
           "output_dir": "saves", **BATCH, "learning_rate": 1e-4, "bf16": True}  # fmt: skip
FACTORY_LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "machine_rank": 0, "num_machines": 1,
              "num_processes": 8, "main_training_function": "main", "rdzv_backend": "static",
              "mixed_precision": "bf16", "use_cpu": False}  # fmt: skip
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8,
                                     "weight_decay": 0.1}}  # fmt: skip
TITAN = """
[job]
dump_folder = "./outputs"
description = "{flavor} training"

[profiling]
enable_profiling = true
profile_freq = 100

[model]
name = "llama3"
flavor = "{flavor}"

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
{more}"""


def titan(more: str, flavor: str = "8B", cluster: str = "8xH100-SXM") -> Recipe:
    """A torchtitan TOML; its table is read from the text."""
    text = TITAN.format(flavor=flavor, more=more)
    return Recipe("torchtitan", "train.toml", text, {}, cluster=cluster)


RECIPES: dict[str, Recipe] = {
    "sft, batch alone": script("SFTConfig", BATCH),
    "sft, nothing": script("SFTConfig", {"output_dir": "out"}),
    "sft, fsdp, cosine": script("SFTConfig", {**BATCH, **FSDP, "lr_scheduler_type": "cosine",
                                              "num_train_epochs": 2, "max_length": 4096}),
    "sft, lora": script("SFTConfig", {**BATCH, "learning_rate": 2e-4, "packing": True}, LORA),
    "sft, qlora": script("SFTConfig", {"per_device_train_batch_size": 1, "max_steps": 500,
                                       "gradient_checkpointing": True, "optim": "adamw_torch",
                                       "weight_decay": 0.01}, QLORA),
    "sft, no recompute": script("SFTConfig", {**BATCH, "gradient_checkpointing": False,
                                              "adam_beta2": 0.95, "warmup_steps": 100,
                                              "max_steps": 2000, "seed": 0}),
    "sft, bf16": script("SFTConfig", BATCH, "model = AutoModelForCausalLM.from_pretrained(model_id"
                        ", dtype=torch.bfloat16)\n"),
    "dpo": script("DPOConfig", {**BATCH, "beta": 0.1, **FSDP}),
    "dpo, lora": script("DPOConfig", {"per_device_train_batch_size": 4, "learning_rate": 5e-6,
                                      "lr_scheduler_type": "constant_with_warmup",
                                      "max_grad_norm": 0.3}, LORA),
    "trainer script": script("TrainingArguments", {**BATCH, "bf16": True, "num_train_epochs": 1,
                                                   "label_names": ["labels"]}),
    "trainer json": table("trainer", "args.json", {**BATCH, **FSDP_LATE, "output_dir": "out",
                                                   "learning_rate": 1e-5, "bf16": True,
                                                   "max_steps": 300}, "TrainingArguments"),
    "trainer yaml": table("trainer", "args.yaml", {"per_device_train_batch_size": 4,
                                                   "output_dir": "out", "torch_compile": True,
                                                   "lr_scheduler_type": "constant"},
                          "TrainingArguments"),
    "trl yaml": table("trl", "sft.yaml", {"model_name_or_path": "llama-3-8b", **BATCH,
                                          "dataset_name": "trl-lib/Capybara", "packing": True,
                                          "max_length": 2048, "learning_rate": 2e-5,
                                          "output_dir": "out"}, "SFTConfig"),
    "trl yaml, peft": table("trl", "sft.yaml", {"model_name_or_path": "llama-3-8b", **PEFT,
                                                "per_device_train_batch_size": 8, "dtype":
                                                "bfloat16", "dataset_name": "a/b",
                                                "num_train_epochs": 1.0}, "SFTConfig"),
    "trl yaml, fsdp": table("trl", "sft.yaml", {"model_name_or_path": "llama-3-8b", **BATCH,
                                                **FSDP, "max_length": 8192, "max_steps": 1000,
                                                "dataset_name": "a/b"}, "SFTConfig"),
    "trl dpo yaml": table("trl", "dpo.yaml", {"model_name_or_path": "llama-3-8b", **BATCH,
                                              "dataset_name": "a/b", "beta": 0.2,
                                              "precompute_ref_log_probs": True}, "DPOConfig"),
    "axolotl lora": table("axolotl", "lora.yml", {**AXOLOTL, **AXOLOTL_LORA, "num_epochs": 4,
                                                  "gradient_checkpointing": True}),
    "axolotl qlora": table("axolotl", "qlora.yml", {**AXOLOTL, **AXOLOTL_LORA, "adapter": "qlora",
                                                    "load_in_4bit": True, "sample_packing": True,
                                                    "optimizer": "adamw_torch_8bit",
                                                    "lr_scheduler": "cosine", "num_epochs": 1}),
    "axolotl fsdp": table("axolotl", "fft.yml", {**AXOLOTL, **AXOLOTL_FSDP, "sample_packing": True,
                                                 "learning_rate": 2e-5, "weight_decay": 0.0,
                                                 "max_steps": 400}),
    "axolotl ddp": table("axolotl", "ddp.yml", {**AXOLOTL, "gradient_checkpointing": True,
                                                "warmup_steps": 10, "max_steps": 100,
                                                "adam_beta2": 0.95, "max_grad_norm": 0.5}),
    "axolotl dpo": table("axolotl", "dpo.yml", {**AXOLOTL, **AXOLOTL_LORA, "rl": "dpo",
                                                "learning_rate": 1e-5, "num_epochs": 1}),
    "axolotl linear": table("axolotl", "a.yml", {**AXOLOTL, "lr_scheduler": "linear", "seed": 7,
                                                 "num_epochs": 2}),
    "factory lora": table("llama-factory", "lora.yaml", {**FACTORY, **FACTORY_LORA,
                                                         "num_train_epochs": 3.0,
                                                         "lr_scheduler_type": "cosine"}),
    "factory full": table("llama-factory", "full.yaml", {**FACTORY, "finetuning_type": "full",
                                                         "learning_rate": 1e-5, **FSDP}),
    "factory qlora": table("llama-factory", "qlora.yaml", {**FACTORY, **FACTORY_LORA,
                                                           "quantization_bit": 4,
                                                           "quantization_method": "bnb"}),
    "factory pt": table("llama-factory", "pt.yaml", {**FACTORY, "stage": "pt",
                                                     "finetuning_type": "full", "max_steps": 50}),
    "factory dpo": table("llama-factory", "dpo.yaml", {**FACTORY, **FACTORY_LORA, "stage": "dpo",
                                                       "pref_beta": 0.1, "pref_loss": "sigmoid",
                                                       "learning_rate": 5e-6}),
    "accelerate fsdp2": table("accelerate", "fsdp2.yaml", {**ACCELERATE, "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_activation_checkpointing": True, "fsdp_offload_params": False}}),
    "accelerate zero2": table("accelerate", "zero2.yaml", {**ACCELERATE, "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}),
    "accelerate ddp": table("accelerate", "ddp.yaml", {**ACCELERATE,
                                                       "distributed_type": "MULTI_GPU"}),
    "accelerate hybrid": table("accelerate", "h.yaml", {**ACCELERATE, "distributed_type": "FSDP",
        "num_processes": 16, "num_machines": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2,
                               "parallelism_config_dp_shard_size": 8}},
        cluster="2x8xH100-SXM@400Gbps"),
    "deepspeed zero2": table("deepspeed", "ds2.json", {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "bf16": {"enabled": True}, "optimizer": ADAMW,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}}),
    "deepspeed zero3": table("deepspeed", "ds3.json", {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7}}),
    "deepspeed zero1": table("deepspeed", "ds1.json", {
        "train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    "titan fsdp": titan("[parallelism]\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\n"
                        'mode = "selective"\nselective_ac_option = "op"\n[compile]\n'
                        "enable = true\n"),
    "titan tensor": titan("[parallelism]\ntensor_parallel_degree = 8\n[activation_checkpoint]\n"
                          'mode = "full"\n', "70B", "8x8xH100-SXM@400Gbps"),
    "titan ddp": titan("global_batch_size = 16\n[parallelism]\ndata_parallel_shard_degree = 1\n"
                       "data_parallel_replicate_degree = 8\n[activation_checkpoint]\n"
                       'mode = "none"\n', "1B"),
}  # fmt: skip
