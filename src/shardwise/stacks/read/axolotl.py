"""Read the YAML of axolotl as settings of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.spec.adapter import ALL_LINEAR
from shardwise.spec.record import SpecError
from shardwise.stacks.attention import read_attention
from shardwise.stacks.experts import set_experts
from shardwise.stacks.outcomes import ABSENT, repr_text
from shardwise.stacks.read import accelerate, known_keys
from shardwise.stacks.read.adapters import LoraKeys, Quantisation, set_base, set_lora, set_master
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    boolean,
    list_unknown,
    positive_integer,
    subtable,
)
from shardwise.stacks.read.method import as_dpo
from shardwise.stacks.read.model_name import set_model
from shardwise.stacks.read.packed import set_packing
from shardwise.stacks.read.trainer import read_deepspeed, restore_given_keys
from shardwise.stacks.table import keys_of, read_rows
from shardwise.stacks.training_arguments import AXOLOTL_BATCH, AXOLOTL_METHODS, AXOLOTL_TRAIN

_LORA = LoraKeys("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "peft_use_rslora",
                 "peft_use_dora", "lora_modules_to_save")  # fmt: skip
_KERNELS = "Shardwise runs the model's own kernels"
_TASK = "the loss is plain cross entropy of a language model in Shardwise"
_LOST = {
    "warmup_ratio": "set train.warmup_steps, which counts steps",
    "chunked_cross_entropy": "all logits are planned; set loss = chunked for a chunked head",
    "tiled_mlp": "Shardwise has no counterpart",
    "lora_mlp_kernel": _KERNELS, "lora_qkv_kernel": _KERNELS, "lora_o_kernel": _KERNELS,
    "lora_embedding_kernel": _KERNELS, "use_scattermoe": _KERNELS, "use_sonicmoe": _KERNELS,
    "fused_attn_kernel": _KERNELS, "flash_attn_fuse_mlp": _KERNELS,
    "flash_attn_rms_norm": _KERNELS, "flash_attn_cross_entropy": _KERNELS,
    "lora_target_parameters": "adapters of single parameters are not planned",
    "activation_offloading": "read without it; set offload in [strategy] to activations",
    "auto_find_batch_size": "shardwise plan finds the batch instead",
    "ddp_find_unused_parameters": "every parameter must receive a gradient in Shardwise",
    "neftune_noise_alpha": "Shardwise adds no noise to embeddings",
    "optim_args": "set the optimizer's settings in [train]",
    "lr_scheduler_kwargs": "set train.schedule", "cosine_constant_lr_ratio": "set train.schedule",
    "lr_quadratic_warmup": "the learning rate warms up linearly in Shardwise",
    "loraplus_lr_ratio": "all parameters have one learning rate in Shardwise",
    "embedding_lr": "all parameters have one learning rate in Shardwise",
    "lr_groups": "all parameters have one learning rate in Shardwise",
    "relora": "adapters are not restarted in Shardwise", "peft": "Shardwise has no counterpart",
    "lisa_n_layers": "the trained layers never change in Shardwise",
    "fp8": "matmuls are planned in bf16", "qat": "Shardwise does not train quantised weights",
    "fp8_enable_fsdp_float8_all_gather": "parameters are gathered in bf16",
    "gptq": "weights are planned as adapter.base says",
    "model_quantization_config": "weights are planned as adapter.base says",
    "diffusion": _TASK, "ebft": _TASK, "use_eaft": _TASK, "num_labels": _TASK,
}  # fmt: skip
# axolotl's keys for degrees, and accelerate's.
_DEGREES = {"dp_replicate_size": accelerate.REPLICATE, "dp_shard_size": accelerate.SHARD,
            "tensor_parallel_size": accelerate.TENSOR, "context_parallel_size": accelerate.CONTEXT,
            "sequence_parallel_degree": accelerate.CONTEXT}  # fmt: skip
# Values that switch a setting off; a degree of 1 is off too.
_NOTHING: tuple[object, ...] = (None, False, 0, 1, [], {})
_TRACKERS = ("swanlab_", "otel_", "wandb_", "mlflow_", "comet_", "trackio_", "use_otel_")
_TASKS = ("reward_model", "process_reward_model")
_KEYS_OF_ROWS = keys_of((*AXOLOTL_BATCH, *AXOLOTL_TRAIN, *AXOLOTL_METHODS))
_PATTERN = re.compile(r"[\w.]+")


def is_axolotl(table: Mapping[str, object]) -> bool:
    """Whether a table looks like a configuration of axolotl."""
    keys = ("micro_batch_size", "sequence_len", "datasets", "lora_r", "gradient_accumulation_steps")
    return "base_model" in table and any(key in table for key in keys)


def read(table: Mapping[str, object]) -> Imported:
    """The settings of an axolotl YAML; the launcher decides the number of processes."""
    given = {key: value for key, value in table.items() if value is not None}
    _check_task(given)
    reading = Reading("an axolotl configuration")
    known = (*known_keys.AXOLOTL, *_KEYS_OF_ROWS, *_LOST)
    list_unknown(reading, _without_groups(given), known)
    low = _precision(given, reading)
    _sharding(given, low, reading)
    read_rows(AXOLOTL_BATCH, given, reading)
    if given.get("batch_size") and not given.get("gradient_accumulation_steps"):
        reading.lose("batch_size", "divide it by micro_batch_size and devices; set accumulate")
    _read_trained_parameters(given, reading)
    _weights(given, low, reading)
    read_rows(AXOLOTL_TRAIN, given, reading)
    _recompute(given, reading)
    set_packing(reading, given, "sample_packing", absent=False)
    read_attention(given, reading)
    _read_other_keys(given, reading)
    degree = positive_integer(given, "expert_parallel_size")
    set_experts(reading, "expert_parallel_size", degree or 1)
    found = reading.finish()
    return as_dpo(found, f"rl {given['rl']}", reference=True) if given.get("rl") else found


def _without_groups(table: Mapping[str, object]) -> list[str]:
    """The keys of the table without those of Liger's kernels, read by a row, and of trackers."""
    return [key for key in table if not key.startswith(("liger_", *_TRACKERS))]


def _check_task(table: Mapping[str, object]) -> None:
    """Raise SpecError for tasks other than language modelling with supervised data."""
    if table.get("rl") and table["rl"] not in ("dpo", "ipo"):
        raise SpecError(
            f"rl: {repr_text(table['rl'])} is not read; Shardwise plans dpo, ipo, supervised "
            "fine-tuning and pre-training"
        )
    for key in _TASKS:
        if boolean(table, key, otherwise=False):
            raise SpecError(f"{key}: it is not read; Shardwise plans language models only")


def _precision(table: Mapping[str, object], reading: Reading) -> str | None:
    """The dtype that axolotl computes in and loads the model in, "bf16" or "fp16"; or None."""
    if table.get("bf16") == "auto":
        low = "fp16" if boolean(table, "fp16", otherwise=False) else "bf16"
        reading.remark(f"bf16 auto is read as {low}, as on GPUs that have it.")
        return low
    for key, name in (
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("fp16", "fp16"),
        ("float16", "fp16"),
    ):
        if boolean(table, key, otherwise=False):
            return name
    return None


def _sharding(table: Mapping[str, object], low: str | None, reading: Reading) -> None:
    """Read the sharding: DeepSpeed, FSDP or DDP."""
    pure = not any(table.get(key) for key in ("bf16", "fp16"))
    mixed = None if pure else low
    if table.get("deepspeed"):
        inside = read_deepspeed(table["deepspeed"], low, reading)
        degrees = _degrees(table, reading)
        if accelerate.CONTEXT in degrees:
            # With DeepSpeed, context parallelism is always Ulysses.
            degrees[accelerate.ULYSSES] = degrees.pop(accelerate.CONTEXT)
        accelerate.read_inner_axes(degrees, reading)
    else:
        inside = accelerate.read({**_accelerate_table(table, reading), "mixed_precision": mixed})
    reading.add_nested(inside, without=("micro_batch", "accumulate"))
    ddp = "Without fsdp_config or deepspeed axolotl runs DDP"
    restore_given_keys(reading, ddp, leave_out=("zero_stage",))


def _accelerate_table(table: Mapping[str, object], reading: Reading) -> dict[str, object]:
    """The accelerate configuration that axolotl builds from its own keys."""
    settings = {
        key.removeprefix("fsdp_"): value for key, value in subtable(table, "fsdp_config").items()
    }
    degrees = _degrees(table, reading)
    if not settings and not table.get("fsdp"):
        for key in table:
            if key in _DEGREES and not key.startswith("dp_") and table[key] != 1:
                reading.lose(key, "without fsdp_config axolotl is read as DDP")
        return {"distributed_type": "MULTI_GPU"}
    list_unknown(reading, settings, known_keys.AXOLOTL_FSDP, "fsdp_config.")
    if settings.pop("mixed_precision_policy", None):
        reading.lose("fsdp_config.mixed_precision_policy", "bf16 and fp16 decide here")
    version = positive_integer(table, "fsdp_version") or positive_integer(settings, "version") or 1
    for name in ("cpu_offload_pin_memory", "final_state_dict_type"):
        settings.pop(name, None)
    if version == 2:
        # Files written for FSDP1 still contain these keys, which FSDP2 ignores.
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch"):
            settings.pop(name, None)
    config = {f"fsdp_{key}": value for key, value in settings.items() if value is not None}
    config["fsdp_version"] = version
    launched: dict[str, object] = {"distributed_type": "FSDP", "fsdp_config": config}
    return {**launched, "parallelism_config": degrees} if degrees else launched


def _degrees(table: Mapping[str, object], reading: Reading) -> dict[str, object]:
    """The degrees, by the names of accelerate's ParallelismConfig."""
    found = {theirs: table[key] for key, theirs in _DEGREES.items() if key in table}
    context = subtable(table, "context_parallel")
    if context.get("size") is not None:
        method = context.get("backend", "auto")
        ulysses = method == "ulysses"
        found[accelerate.ULYSSES if ulysses else accelerate.CONTEXT] = context["size"]
        if method not in ("ulysses", "ring"):
            as_ring = f"{repr_text(method)} is read as ring attention"
            reading.lose("context_parallel.backend", as_ring)
    return found


def _read_trained_parameters(table: Mapping[str, object], reading: Reading) -> None:
    """Read which parameters are trained: LoRA, or patterns of parameter names."""
    kind = table.get("adapter")
    if kind in ("lora", "qlora"):
        linear = boolean(table, "lora_target_linear", otherwise=False)
        set_lora(reading, {**table, "lora_target_modules": ALL_LINEAR} if linear else table, _LORA)
        if linear and table.get("lora_target_modules"):
            reading.remark(
                "lora_target_linear adapts every linear layer; lora_target_modules is in."
            )
    elif kind:
        raise SpecError(f"adapter: {repr_text(kind)} is not read; known are lora and qlora")
    patterns = table.get("unfrozen_parameters")
    if not patterns:
        return
    names = patterns if isinstance(patterns, list) else [patterns]
    plain = [str(name).strip("^$") for name in names]
    readable = tuple(name for name in plain if _PATTERN.fullmatch(name))
    if readable:
        reading.adapter["train"] = readable
        more = f": {', '.join(readable[:4])}"
        reading.given("unfrozen_parameters", {"adapter.train": ABSENT}, why=more)
    for name in plain:
        if name not in readable:
            pattern = f"{repr_text(name)} is a pattern; set adapter.train"
            reading.lose("unfrozen_parameters", pattern)


def _weights(table: Mapping[str, object], low: str | None, reading: Reading) -> None:
    """Read how frozen weights are stored, and the dtype of trained ones."""
    quantised = None
    if boolean(table, "load_in_4bit", otherwise=False):
        more = subtable(table, "bnb_config_kwargs")
        kind = str(more.get("bnb_4bit_quant_type", "nf4"))
        double = boolean(more, "bnb_4bit_use_double_quant", otherwise=True)
        quantised = Quantisation(4, kind, double)
    elif boolean(table, "load_in_8bit", otherwise=False):
        quantised = Quantisation(8)
    set_base(reading, low or "fp32", quantised)
    if reading.adapter and boolean(table, "quantize_moe_experts", otherwise=False):
        reading.given("quantize_moe_experts", {"adapter.quantised_experts": True})
    set_master(reading, low)


def _recompute(table: Mapping[str, object], reading: Reading) -> None:
    """Read activation checkpointing: every block or none."""
    given = table.get("gradient_checkpointing")
    if given in ("offload", "offload_disk"):
        reading.lose("gradient_checkpointing", "activations stay on the device", given)
    elif not boolean(table, "gradient_checkpointing", otherwise=False):
        return
    reading.given("gradient_checkpointing", {"recompute": "full"}, why=": every block")


def _read_other_keys(table: Mapping[str, object], reading: Reading) -> None:
    """Read compile and DDP buckets, and report keys without a counterpart."""
    automatic = table.get("torch_compile") == "auto"
    read_rows(AXOLOTL_METHODS, {**table, "torch_compile": None} if automatic else table, reading)
    for key, why in _LOST.items():
        value = table.get(key)
        if value is True or (key in table and value not in _NOTHING):
            reading.lose(key, why)
    set_model(reading, table, "base_model")
