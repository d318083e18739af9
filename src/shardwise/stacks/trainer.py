"""The TrainingArguments of transformers' Trainer, as JSON or YAML."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError
from shardwise.stacks import accelerate, deepspeed, fsdp1
from shardwise.stacks.imported import Imported, Reading, flag, real, section, whole

# The words of its `fsdp` option, as accelerate says them.
_SHARDING = {name.lstrip("_").lower(): name for name in fsdp1.SHARDING}


def is_trainer(table: Mapping[str, object]) -> bool:
    return any(key in table for key in ("per_device_train_batch_size", "fsdp", "deepspeed"))


def read(table: Mapping[str, object]) -> Imported:
    """What they settle; how many processes there are is the launcher's business."""
    low = next((name for name in ("bf16", "fp16") if flag(table, name, otherwise=False)), "no")
    if table.get("deepspeed"):
        inside = _deepspeed(table["deepspeed"])
    else:
        inside = accelerate.read({**_launched(table), "mixed_precision": low})
    reading = Reading("TrainingArguments")
    reading.take(inside, but=("micro_batch", "accumulate"))
    _batch(table, reading)
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
            reading.train[field] = count
    if flag(table, "gradient_checkpointing", otherwise=False):
        reading.strategy["recompute"] = "full"
        reading.note("gradient_checkpointing becomes recompute = full: every block.")
    if flag(table, "torch_compile", otherwise=False):
        reading.strategy["compile"] = True
        reading.note("torch_compile becomes compile = true, block by block.")
    return reading.done()


def _batch(table: Mapping[str, object], reading: Reading) -> None:
    # 8 is the Trainer's own.
    micro = whole(table, "per_device_train_batch_size") or 8
    accumulate = whole(table, "gradient_accumulation_steps") or 1
    reading.strategy |= {"micro_batch": micro, "accumulate": accumulate}
    reading.note(f"per_device_train_batch_size becomes micro_batch = {micro}.")
    reading.note(f"gradient_accumulation_steps becomes accumulate = {accumulate}.")


def _deepspeed(given: object) -> Imported:
    if not isinstance(given, dict):
        raise SpecError(f"deepspeed: the settings are in {str(given)[:80]}; import that file")
    return deepspeed.read(given)


def _launched(table: Mapping[str, object]) -> dict[str, object]:
    """The configuration of accelerate that the Trainer makes of its own options."""
    given = table.get("fsdp")
    words = given if isinstance(given, list) else str(given or "").split()
    if given is True:
        words = ["full_shard", "auto_wrap"]
    if not words or given is False:
        return {"distributed_type": "MULTI_GPU"}
    settings = {**section(table, "fsdp_config")}
    sharding = [_SHARDING[word] for word in map(str, words) if word in _SHARDING]
    version = whole(settings, "version") or whole(settings, "fsdp_version") or 1
    config: dict[str, object] = {
        "fsdp_version": version,
        "fsdp_offload_params": "offload" in words,
        "fsdp_activation_checkpointing": settings.get("activation_checkpointing", False),
        "fsdp_backward_prefetch": settings.get("backward_prefetch"),
        "fsdp_forward_prefetch": settings.get("forward_prefetch"),
        "fsdp_reshard_after_forward": settings.get("reshard_after_forward"),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if "auto_wrap" in words else None,
        "fsdp_transformer_layer_cls_to_wrap": settings.get("transformer_layer_cls_to_wrap"),
        "fsdp_sharding_strategy": sharding[0] if sharding else None,
    }
    if version == 2 and config["fsdp_reshard_after_forward"] is None:
        config["fsdp_reshard_after_forward"] = sharding[:1] != ["SHARD_GRAD_OP"]
    return {"distributed_type": "FSDP", "fsdp_config": config}
