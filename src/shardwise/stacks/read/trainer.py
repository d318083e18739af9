"""Read TrainingArguments of transformers, or a config of TRL such as SFTConfig, from a table."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.stacks.attention import read_attention
from shardwise.stacks.fused_loss import OTHER_KERNELS
from shardwise.stacks.outcomes import Outcome, repr_text
from shardwise.stacks.read import accelerate, deepspeed, fsdp1, known_keys
from shardwise.stacks.read.adapters import (
    LoraKeys,
    Quantisation,
    loaded_dtype,
    set_base,
    set_lora,
    set_master,
)
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    boolean,
    list_unknown,
    positive_integer,
    subtable,
)
from shardwise.stacks.read.method import DPO as DPO_NAME
from shardwise.stacks.read.method import as_dpo
from shardwise.stacks.read.model_name import set_model
from shardwise.stacks.read.objective import is_unplanned, objective_of_table
from shardwise.stacks.read.packed import set_packing
from shardwise.stacks.table import (
    Table,
    defaults_of,
    keys_of,
    lost_rows,
    read_rows,
    with_changed_rows,
)
from shardwise.stacks.training_arguments import (
    BATCH,
    DPO,
    METHODS,
    OTHER_OBJECTIVES,
    SCHEDULE,
    SFT,
    TRAIN,
)

# The words of the `fsdp` option, and accelerate's names for them.
_SHARDING = {name.lstrip("_").lower(): name for name in fsdp1.SHARDING}
_WORDS = (*_SHARDING, "offload", "auto_wrap")
# Arguments that have no counterpart or another meaning, and what to do instead.
_LOST = {
    "warmup_ratio": "set train.warmup_steps, which counts steps",
    "optim_args": "set the optimizer's settings in [train]",
    "ddp_find_unused_parameters": "every parameter must receive a gradient in Shardwise",
    "auto_find_batch_size": "shardwise plan finds the batch instead",
    "label_smoothing_factor": "the loss is plain cross entropy in Shardwise",
    "neftune_noise_alpha": "Shardwise adds no noise to embeddings",
    "accelerator_config": "Shardwise has no counterpart",
    "lora_target_parameters": "adapters of single parameters are not planned",
    "activation_offloading": "read without it; set offload in [strategy] to activations",
    "router_aux_loss_coef": "set train.balance_loss; its coefficient is that of the model",
}
# TRL's names, new and old, for the tokens per sequence.
_SEQ_LEN = ("max_length", "max_seq_length")
# Keys of a nested DeepSpeed configuration that, if "auto", take the value of an argument.
_AUTO = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "gradient_clipping": "max_grad_norm",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
# Keys of a nested DeepSpeed configuration that the Trainer's own arguments override.
_OF_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Defaults of TRL's SFTConfig and ModelConfig.
TRL_DEFAULTS: dict[str, object] = {"gradient_checkpointing": True, "bf16": True, "max_length": 1024}
_TRL_LORA = LoraKeys("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "use_rslora",
                     "use_dora", "lora_modules_to_save", default_rank=16, default_alpha=32,
                     default_dropout=0.05)  # fmt: skip
# The key of Liger's kernels, and the fields that it sets.
_LIGER, _LOSS = "use_liger_kernel", ("loss", "loss_kernel")
# Environment variables with accelerate's degrees, which a TRL file can set.
ENVIRONMENT = "ACCELERATE_USE_PARALLELISM_CONFIG"
DEGREES = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": accelerate.REPLICATE,
           "PARALLELISM_CONFIG_DP_SHARD_SIZE": accelerate.SHARD,
           "PARALLELISM_CONFIG_TP_SIZE": accelerate.TENSOR,
           "PARALLELISM_CONFIG_CP_SIZE": accelerate.CONTEXT,
           "PARALLELISM_CONFIG_SP_SIZE": accelerate.ULYSSES}  # fmt: skip
# The DeepSpeed files of axolotl and LLaMA-Factory have the ZeRO stage in their names.
_STAGE = re.compile(r"(?:zero|z|stage)[-_]?([0-3])(?![0-9])")


def is_trainer(table: Mapping[str, object]) -> bool:
    """Whether a table looks like TrainingArguments."""
    keys = ("per_device_train_batch_size", "fsdp", "deepspeed", "gradient_checkpointing", *_SEQ_LEN)
    return any(key in table for key in keys)


def is_trl(table: Mapping[str, object]) -> bool:
    """Whether a table looks like a configuration of TRL."""
    of_trl = any(key in table for key in known_keys.TRL_ONLY)
    return is_trainer(table) and (of_trl or objective_of_table(table) is not None)


def read_trl(table: Mapping[str, object]) -> Imported:
    """The settings of a file for `trl sft --config`, with TRL's defaults."""
    absent = {
        key: value
        for key, value in TRL_DEFAULTS.items()
        if table.get(key) is None and not (key == "bf16" and table.get("fp16"))
    }
    if table.get("max_seq_length") is not None:
        absent.pop("max_length", None)
    objective = objective_of_table(table)
    rows = with_changed_rows(TRAIN, rows_of(objective))
    found = read({**absent, **table}, "a TRL configuration", rows=rows)
    if objective == DPO_NAME:
        found = as_trl_dpo(found, "A key of DPOConfig", table)
    return found if is_unplanned(found) else with_trl_loss(found, absent, table)


def rows_of(objective: str | None) -> dict[str, dict[str, Any]]:
    """The rows of `[train]` in which TRL's configuration for an objective has other defaults."""
    return {None: SFT, DPO_NAME: DPO}.get(objective, OTHER_OBJECTIVES)


def as_trl_dpo(found: Imported, key: str, table: Mapping[str, object]) -> Imported:
    """The settings of a DPOConfig, of which the keys are in `table`."""
    before = boolean(table, "precompute_ref_log_probs", otherwise=False)
    why = "precompute_ref_log_probs runs the reference model before the first step"
    return as_dpo(found, key, reference=not before, why=why if before else "")


def with_trl_loss(
    found: Imported, absent: Mapping[str, object], table: Mapping[str, object]
) -> Imported:
    """The settings with the chunked loss of SFTTrainer and DPOTrainer, and TRL's defaults.

    `absent` are the keys that the file leaves to TRL, with TRL's values. With label smoothing the
    loss is not chunked.
    """
    outcomes = defaults_of_trl(absent)
    strategy = {name: value for name, value in found.strategy.items() if name not in _LOSS}
    if boolean(table, _LIGER, otherwise=False):
        # TRL leaves Liger's loss out, which would replace its own head.
        outcomes.append(Outcome("lost", _LIGER, why=OTHER_KERNELS))
    found = found._replace(outcomes=tuple(one for one in found.outcomes if one.key != _LIGER))
    if not table.get("label_smoothing_factor"):
        strategy["loss"] = "chunked"
        trainer = "DPOTrainer" if found.objective == DPO_NAME else "SFTTrainer"
        tiles = f"{trainer} of TRL 1.16 computes head and loss in tiles: loss = chunked."
        outcomes.append(Outcome("remark", fields={"loss": "chunked"}, why=tiles))
    return found._replace(strategy=strategy, outcomes=(*outcomes, *found.outcomes))


def defaults_of_trl(absent: Mapping[str, object]) -> list[Outcome]:
    """One outcome for each key that a file leaves to TRL, with TRL's value."""
    return [Outcome("default", key, value, whose="TRL's") for key, value in absent.items()]


def read(
    table: Mapping[str, object],
    what: str = "TrainingArguments",
    known: tuple[str, ...] = (*known_keys.TRAINER, *known_keys.TRL),
    rows: Table = TRAIN,
) -> Imported:
    """The settings of a table of TrainingArguments; the launcher decides the number of processes.

    Args:
        table: The keys and values of the file.
        what: What the file is, in words.
        known: Keys that are not reported as unknown.
        rows: The rows of `[train]`.
    """
    reading = read_arguments(table, what, known, rows)
    if boolean(table, "use_peft", otherwise=False):
        set_lora(reading, table, _TRL_LORA)
    set_base(
        reading, table.get("dtype") or table.get("torch_dtype") or "float32", _quantisation(table)
    )
    set_master(reading, loaded_dtype(reading, table.get("dtype") or table.get("torch_dtype")))
    of_sft = is_trl(table) and objective_of_table(table) is None
    set_packing(reading, table, "packing", False if of_sft else None)
    read_attention(table, reading)
    set_model(reading, table, "model_name_or_path")
    return reading.finish()._replace(objective=objective_of_table(table))


def _quantisation(table: Mapping[str, object]) -> Quantisation | None:
    """The bitsandbytes format of frozen weights in TRL's keys; None without quantisation."""
    if boolean(table, "load_in_4bit", otherwise=False):
        kind = table.get("bnb_4bit_quant_type") or "nf4"
        double = boolean(table, "use_bnb_nested_quant", otherwise=False)
        return Quantisation(4, str(kind), double)
    return Quantisation(8) if boolean(table, "load_in_8bit", otherwise=False) else None


def _read_batch(table: Mapping[str, object], inside: Imported, reading: Reading) -> None:
    """Read micro-batch and accumulation; other values of DeepSpeed, `inside`, are reported."""
    for field in ("micro_batch", "accumulate"):
        reading.strategy.pop(field, None)
    read_rows(BATCH, table, reading)
    for field in ("micro_batch", "accumulate"):
        theirs, ours = inside.strategy.get(field), reading.strategy.get(field)
        if theirs is not None and theirs != ours:
            reading.lose(
                field,
                f"deepspeed says {theirs} and TrainingArguments {ours}, which the Trainer refuses; "
                f"read as {ours}",
            )


def read_arguments(
    table: Mapping[str, object],
    what: str,
    known: tuple[str, ...],
    rows: Table = TRAIN,
    undecided: frozenset[str] = frozenset(),
) -> Reading:
    """Read the keys of TrainingArguments, without adapters and the dtype of the model.

    `rows` are those of `[train]`. `undecided` are keys whose values are known only at run time.
    """
    reading = Reading(what)
    reading.undecided = undecided
    # A script may have arguments of its own in the same file; listing them does no harm.
    of_rows = keys_of((*BATCH, *METHODS, *rows, SCHEDULE))
    list_unknown(reading, table, (*known, *of_rows, *_LOST))
    low = [name for name in ("bf16", "fp16") if boolean(table, name, otherwise=False)]
    if len(low) > 1:
        reading.lose("bf16 and fp16", "both are true, which the Trainer refuses; read as bf16")
    if table.get("deepspeed"):
        inside = read_deepspeed(table["deepspeed"], low[0] if low else None, reading)
    else:
        launched = _accelerate_table(table, reading)
        inside = accelerate.read({**launched, "mixed_precision": low[0] if low else None})
    # Values that DeepSpeed leaves to the Trainer are among the arguments, or their defaults.
    settled = {key for key in table if table[key] is not None} | {*defaults_of(rows)}
    automatic = (theirs for theirs, key in _AUTO.items() if key in settled - undecided)
    reading.add_nested(inside, without=("micro_batch", "accumulate", *automatic))
    restore_given_keys(
        reading, "Without fsdp or deepspeed the Trainer runs DDP", leave_out=_OF_BATCH
    )
    if table.get("deepspeed") and low and low[0] != inside.strategy.get("param_dtype"):
        reading.lose(low[0], "the settings of deepspeed decide, and do not enable it")
    _read_batch(table, inside, reading)
    read_rows((*rows, SCHEDULE, *lost_rows(_LOST)), table, reading)
    for key in _SEQ_LEN:
        length = positive_integer(table, key)
        if length is not None:
            reading.given(key, {"job.seq_len": length})
            break
    if boolean(table, "gradient_checkpointing", otherwise=False):
        reading.given("gradient_checkpointing", {"recompute": "full"}, why=": every block")
    read_rows(METHODS, table, reading)
    return reading


def read_deepspeed(given: object, low: str | None, reading: Reading) -> Imported:
    """The settings of a nested DeepSpeed configuration, or of a file whose name gives the stage.

    `low` is the Trainer's low precision; it replaces "auto" of bf16 and fp16.
    """
    if isinstance(given, str):
        given = _named_stage(given, reading)
    if not isinstance(given, dict):
        raise SpecError(f"deepspeed: the settings are in {repr_text(given)}; import that file")
    settings = dict(given)
    for name in ("bf16", "fp16"):
        if subtable(settings, name).get("enabled") == "auto":
            settings[name] = {**subtable(settings, name), "enabled": name == low}
    return deepspeed.read(settings)


def _named_stage(path: str, reading: Reading) -> object:
    """A DeepSpeed configuration from the ZeRO stage in a file's name; else the path itself."""
    name = path.replace("\\", "/").rpartition("/")[2].lower()
    match = _STAGE.search(name)
    if match is None:
        return path
    stage = int(match.group(1))
    zero: dict[str, object] = {"stage": stage}
    if "offload" in name:
        parts = ("offload_param",) if "params" in name else ("offload_optimizer", "offload_param")
        zero |= {part: {"device": "cpu"} for part in parts if stage == 3 or "optim" in part}
    reading.lose(
        "deepspeed",
        f"the settings are in {path[:80]}; its name says ZeRO stage {stage}. Import that file for "
        "the rest",
    )
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def restore_given_keys(reading: Reading, ddp: str, leave_out: Collection[str]) -> None:
    """Rename accelerate's settings in the outcomes to the keys of the file that they came from.

    Args:
        reading: Its outcomes are replaced.
        ddp: The start of the note for DDP: in which case this stack runs DDP.
        leave_out: Keys without a note; losses stay.
    """
    reading.outcomes = [
        _with_given_key(one, ddp)
        for one in reading.outcomes
        if one.is_lost or one.key not in leave_out
    ]


def _with_given_key(one: Outcome, ddp: str) -> Outcome:
    """The outcome with accelerate's key replaced by the file's own.

    `ddp` is as in `restore_given_keys`.
    """
    if one.key == "mixed_precision" and one.kind == "default":
        nothing = "Without bf16 or fp16 the default"
        return one._replace(kind="given", key=nothing, theirs="fp32", naming="pair")
    if one.key == "mixed_precision" and one.kind == "given":
        return one._replace(key=one.theirs, theirs=True)
    if one.key == "distributed_type" and one.kind == "given":
        return one._replace(key=f"{ddp}, which", naming="key")
    return one


def _accelerate_table(table: Mapping[str, object], reading: Reading) -> dict[str, object]:
    """The accelerate configuration that the Trainer builds from its own options."""
    words = _fsdp_words(table.get("fsdp"))
    if not words:
        if table.get("fsdp_config"):
            reading.lose("fsdp_config", "it has no effect where fsdp is absent")
        return {"distributed_type": "MULTI_GPU"}
    settings = {
        key.removeprefix("fsdp_"): value for key, value in subtable(table, "fsdp_config").items()
    }
    list_unknown(reading, settings, known_keys.TRAINER_FSDP, "fsdp_config.")
    if boolean(settings, "xla", otherwise=False):
        reading.lose("fsdp_config.xla", "Shardwise plans PyTorch's own FSDP, on GPUs or CPUs")
    sharding = [_SHARDING[word] for word in words if word in _SHARDING]
    version = positive_integer(settings, "version") or _version(sharding, reading)
    offloaded = boolean(settings, "cpu_offload", otherwise=False)
    # With FSDP2, transformers 5 wraps every block by default.
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
            reading.lose("fsdp", f"{sharding[0]} is known to FSDP1 only; read as FULL_SHARD")
        keeps = sharding[0] == "SHARD_GRAD_OP"
        config["fsdp_reshard_after_forward"] = not keeps
        word, reshards = sharding[0].lower(), str(not keeps).lower()
        reading.remark(f"fsdp {word} is fsdp_reshard_after_forward {reshards}.")
    launched: dict[str, object] = {"distributed_type": "FSDP", "fsdp_config": config}
    groups = _groups(table)
    return {**launched, "parallelism_config": groups} if groups else launched


def _groups(table: Mapping[str, object]) -> dict[str, object]:
    """The degrees of accelerate's ParallelismConfig: from a script, or from `env` of a TRL file."""
    given = table.get("parallelism_config")
    if isinstance(given, dict):
        return dict(given)
    settings = subtable(table, "env")
    if not boolean(settings, ENVIRONMENT, otherwise=False):
        return {}
    return {key: settings[name] for name, key in DEGREES.items() if name in settings}


def _fsdp_words(given: object) -> list[str]:
    """The words of the `fsdp` option.

    Raises:
        SpecError: A word is unknown: ignoring it would shard differently.
    """
    if given is None or given is False:
        return []
    if given is True:
        return ["auto_wrap"]
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SpecError(
            f"fsdp: must be true, or words such as 'full_shard', not {repr_text(given)}"
        )
    for word in words:
        if word not in _WORDS:
            raise SpecError(
                f"fsdp: {word[:40]!r} is not one of {', '.join(_WORDS)}{did_you_mean(word, _WORDS)}"
            )
    return words


def _version(sharding: list[str], reading: Reading) -> int:
    """The FSDP version if the file gives none: 2, as in transformers 5.

    1 if only FSDP1 has the sharding strategy.
    """
    old = any(name not in ("FULL_SHARD", "SHARD_GRAD_OP") for name in sharding)
    version = 1 if old else 2
    reading.remark(
        "fsdp_config.version is absent, so FSDP1 is assumed, which alone knows this sharding."
        if old
        else "fsdp_config.version is absent, so the default of transformers 5 holds: FSDP2."
    )
    return version
