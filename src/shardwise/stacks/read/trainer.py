"""Read TrainingArguments of transformers, or SFTConfig and its like of TRL, from a table."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.stacks.read import accelerate, deepspeed, fsdp1, known_keys
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    flag,
    list_unknown,
    quoted,
    real,
    section,
    set_warmup,
    whole,
)

# The words of its `fsdp` option, as accelerate says them.
_SHARDING = {name.lstrip("_").lower(): name for name in fsdp1.SHARDING}
_WORDS = (*_SHARDING, "offload", "auto_wrap")
# Arguments without a counterpart, or with another meaning, and what to do.
_LOST = {
    "warmup_ratio": "set train.warmup_steps, which counts steps",
    "num_train_epochs": "set train.steps, which counts steps",
    "optim_args": "set the optimizer's settings in [train]",
    "ddp_find_unused_parameters": "every parameter must receive a gradient in Shardwise",
    "auto_find_batch_size": "shardwise plan finds the batch instead",
    "label_smoothing_factor": "the loss is plain cross entropy in Shardwise",
    "neftune_noise_alpha": "Shardwise adds no noise to embeddings",
    "use_liger_kernel": "Shardwise runs the model's own kernels",
    "parallelism_config": "set shard and replicate yourself",
    "accelerator_config": "Shardwise has no counterpart",
    "use_peft": "Shardwise trains every parameter; LoRA is not planned",
    "load_in_4bit": "Shardwise does not quantize the model",
    "load_in_8bit": "Shardwise does not quantize the model",
    "activation_offloading": "activations stay on the device in Shardwise",
}
# Tokens per sequence, by the names that TRL has had for it.
_SEQ_LEN = ("max_length", "max_seq_length")
# What a nested DeepSpeed configuration takes from these where it says "auto".
_AUTO = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "gradient_clipping": "max_grad_norm",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
               "sgd": "sgd"}  # fmt: skip


def is_trainer(table: Mapping[str, object]) -> bool:
    keys = ("per_device_train_batch_size", "fsdp", "deepspeed", "gradient_checkpointing", *_SEQ_LEN)
    return any(key in table for key in keys)


def read(table: Mapping[str, object], what: str = "TrainingArguments") -> Imported:
    """The settings of a run; the number of processes is the launcher's, not in this table."""
    reading = Reading(what)
    # A script may have arguments of its own in the same file; listing them does no harm.
    list_unknown(reading, table, (*known_keys.TRAINER, *known_keys.TRL))
    low = [name for name in ("bf16", "fp16") if flag(table, name, otherwise=False)]
    if len(low) > 1:
        reading.drop("bf16 and fp16: both are true, which the Trainer refuses; read as bf16.")
    if table.get("deepspeed"):
        inside = _deepspeed(table["deepspeed"], low[0] if low else None)
    else:
        launched = _launched(table, reading)
        inside = accelerate.read({**launched, "mixed_precision": low[0] if low else None})
    # Values that DeepSpeed leaves to the Trainer are among the arguments.
    automatic = (f"{theirs}: auto" for theirs, key in _AUTO.items() if table.get(key) is not None)
    reading.take(inside, but=("micro_batch", "accumulate", *automatic))
    reading.notes = [_in_its_words(note) for note in reading.notes if not _of_batch(note)]
    if table.get("deepspeed") and low and low[0] != inside.strategy.get("param_dtype"):
        reading.drop(f"{low[0]}: the settings of deepspeed decide, and do not enable it.")
    _batch(table, reading)
    for field in ("micro_batch", "accumulate"):
        theirs, ours = inside.strategy.get(field), reading.strategy.get(field)
        if theirs is not None and theirs != ours:
            reading.drop(
                f"{field}: deepspeed says {theirs} and TrainingArguments {ours}, which the Trainer "
                f"refuses; read as {ours}."
            )
    _train(table, reading)
    for key in _SEQ_LEN:
        length = whole(table, key)
        if length is not None:
            reading.job["seq_len"] = length
            reading.note(f"{key} becomes job.seq_len = {length}.")
            break
    if flag(table, "gradient_checkpointing", otherwise=False):
        reading.strategy["recompute"] = "full"
        reading.note("gradient_checkpointing becomes recompute = full: every block.")
    bucket = real(table, "ddp_bucket_cap_mb")
    if bucket is not None and reading.strategy.get("kind") == "ddp":
        reading.strategy["ddp_bucket_mib"] = bucket
        reading.note(f"ddp_bucket_cap_mb becomes ddp_bucket_mib = {bucket:g}.")
    if flag(table, "torch_compile", otherwise=False):
        reading.strategy["compile"] = True
        reading.note("torch_compile becomes compile = true, block by block.")
    return reading.done()


def _train(table: Mapping[str, object], reading: Reading) -> None:
    names = {"learning_rate": "learning_rate", "weight_decay": "weight_decay",
             "max_grad_norm": "clip_norm", "adam_beta1": "beta1", "adam_beta2": "beta2",
             "adam_epsilon": "epsilon"}  # fmt: skip
    for key, field in names.items():
        value = real(table, key)
        if value is not None:
            reading.train[field] = value
    for key, field in (("max_steps", "steps"), ("warmup_steps", "warmup_steps")):
        count = whole(table, key) if table.get(key) not in (0, -1) else None
        if count is not None:
            if field == "steps":
                reading.train[field] = count
            else:
                set_warmup(reading, count)
    _optimizer(table, reading)
    _schedule(table, reading)
    for key, why in _LOST.items():
        if table.get(key) not in (None, False, 0):
            reading.drop(f"{key}: {why}.")


def _optimizer(table: Mapping[str, object], reading: Reading) -> None:
    name = table.get("optim")
    if name is None:
        return
    kind = _OPTIMIZERS.get(str(name)) if isinstance(name, str) else None
    if kind is None:
        reading.drop(f"optim: {quoted(name)} is unknown to Shardwise; set job.optimizer.")
        return
    reading.job["optimizer"] = kind
    reading.note(f"optim {name} becomes job.optimizer = {kind}.")


def _schedule(table: Mapping[str, object], reading: Reading) -> None:
    name = table.get("lr_scheduler_type")
    if name is None:
        return
    settings = section(table, "lr_scheduler_kwargs")
    final = real(settings, "min_lr_rate", "lr_scheduler_kwargs.")
    if name in ("constant", "constant_with_warmup"):
        reading.train["schedule"] = "constant"
    elif name == "cosine" or (name == "cosine_with_min_lr" and final is not None):
        reading.train |= {"schedule": "cosine", "final_learning_rate": final or 0.0}
    else:
        reading.drop(
            f"lr_scheduler_type: {quoted(name)} has no counterpart; set train.schedule, which is "
            "cosine or constant."
        )
        return
    list_unknown(reading, settings, ("min_lr_rate",), "lr_scheduler_kwargs.")
    reading.note(f"lr_scheduler_type {name} becomes train.schedule.")


def _batch(table: Mapping[str, object], reading: Reading) -> None:
    # 8 and 1 are the Trainer's own.
    for key, field, default in (
        ("per_device_train_batch_size", "micro_batch", 8),
        ("gradient_accumulation_steps", "accumulate", 1),
    ):
        count = whole(table, key)
        if table.get(key) == "auto":
            reading.drop(f"{field}: {key} is not a number in this file.")
        elif count is None:
            reading.strategy[field] = default
            reading.note(f"{key} is absent, so its default becomes {field} = {default}.")
        else:
            reading.strategy[field] = count
            reading.note(f"{key} becomes {field} = {count}.")


def _deepspeed(given: object, low: str | None) -> Imported:
    """Its own bf16 and fp16 decide; "auto" takes those of the Trainer."""
    if not isinstance(given, dict):
        raise SpecError(f"deepspeed: the settings are in {quoted(given)}; import that file")
    settings = dict(given)
    for name in ("bf16", "fp16"):
        if section(settings, name).get("enabled") == "auto":
            settings[name] = {**section(settings, name), "enabled": name == low}
    return deepspeed.read(settings)


def _of_batch(note: str) -> bool:
    return note.startswith(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))


def _in_its_words(note: str) -> str:
    """A note about accelerate's settings, in the words of the file that they were made of."""
    for theirs, here in (
        ("mixed_precision is absent, so its default no", "Without bf16 or fp16 the default fp32"),
        ("mixed_precision bf16", "bf16 true"),
        ("mixed_precision fp16", "fp16 true"),
        ("MULTI_GPU becomes", "Without fsdp or deepspeed the Trainer runs DDP, which becomes"),
    ):
        if note.startswith(theirs):
            return here + note.removeprefix(theirs)
    return note


def _launched(table: Mapping[str, object], reading: Reading) -> dict[str, object]:
    """The configuration of accelerate that the Trainer makes of its own options."""
    words = _words(table.get("fsdp"))
    if not words:
        if table.get("fsdp_config"):
            reading.drop("fsdp_config: it has no effect where fsdp is absent.")
        return {"distributed_type": "MULTI_GPU"}
    settings = {
        key.removeprefix("fsdp_"): value for key, value in section(table, "fsdp_config").items()
    }
    list_unknown(reading, settings, known_keys.TRAINER_FSDP, "fsdp_config.")
    if flag(settings, "xla", otherwise=False):
        reading.drop("fsdp_config.xla: Shardwise plans PyTorch's own FSDP, on GPUs or CPUs.")
    sharding = [_SHARDING[word] for word in words if word in _SHARDING]
    version = whole(settings, "version") or _version(sharding, reading)
    offloaded = flag(settings, "cpu_offload", otherwise=False)
    # With FSDP2, transformers 5 wraps every block unless told otherwise.
    wraps = "TRANSFORMER_BASED_WRAP" if "auto_wrap" in words or version == 2 else None
    config: dict[str, object] = {
        "fsdp_version": version,
        "fsdp_offload_params": "offload" in words or offloaded,
        "fsdp_auto_wrap_policy": settings.get("auto_wrap_policy", wraps),
        "fsdp_sharding_strategy": sharding[0] if sharding and version == 1 else None,
    }
    for name in ("activation_checkpointing", "backward_prefetch", "forward_prefetch",
                 "reshard_after_forward", "transformer_layer_cls_to_wrap", "min_num_params",
                 *fsdp1.OBSOLETE):  # fmt: skip
        if name in settings:
            config[f"fsdp_{name}"] = settings[name]
    if version == 2 and config.get("fsdp_reshard_after_forward") is None and sharding:
        if sharding[0] not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            reading.drop(f"fsdp: {sharding[0]} is known to FSDP1 only; read as FULL_SHARD.")
        keeps = sharding[0] == "SHARD_GRAD_OP"
        config["fsdp_reshard_after_forward"] = not keeps
        reading.note(
            f"fsdp {sharding[0].lower()} is fsdp_reshard_after_forward {str(not keeps).lower()}."
        )
    return {"distributed_type": "FSDP", "fsdp_config": config}


def _words(given: object) -> list[str]:
    """What `fsdp` asks for; a misspelled word must not shard in another way."""
    if given is None or given is False:
        return []
    if given is True:
        return ["auto_wrap"]
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SpecError(f"fsdp: must be true, or words such as 'full_shard', not {quoted(given)}")
    for word in words:
        if word not in _WORDS:
            raise SpecError(
                f"fsdp: {word[:40]!r} is not one of {', '.join(_WORDS)}{did_you_mean(word, _WORDS)}"
            )
    return words


def _version(sharding: list[str], reading: Reading) -> int:
    """Which FSDP runs where the file does not say: transformers 5 takes the second."""
    old = any(name not in ("FULL_SHARD", "SHARD_GRAD_OP") for name in sharding)
    version = 1 if old else 2
    reading.note(
        "fsdp_config.version is absent, so FSDP1 is assumed, which alone knows this sharding."
        if old
        else "fsdp_config.version is absent, so the default of transformers 5 holds: FSDP2."
    )
    return version
