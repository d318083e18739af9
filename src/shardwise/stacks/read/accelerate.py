"""Read the YAML of `accelerate config` as settings of a run."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.stacks.outcomes import Outcome, plain_text
from shardwise.stacks.read import deepspeed, fsdp1, known_keys
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    boolean,
    list_unknown,
    positive_integer,
    subtable,
    upper_case_text,
)

PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
# Accelerate counts FSDP1's sharding strategies from 1, in this order.
SHARDING = tuple(fsdp1.SHARDING)
_REPLICATED = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
               "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")  # fmt: skip
_POLICY = "fsdp_auto_wrap_policy"
_OF_SCRIPT = "gradient_accumulation_steps of the script is not in this file"
_PREFIX = "parallelism_config_"
REPLICATE, SHARD = f"{_PREFIX}dp_replicate_size", f"{_PREFIX}dp_shard_size"
TENSOR, CONTEXT, ULYSSES = (f"{_PREFIX}{axis}_size" for axis in ("tp", "cp", "sp"))


def read(table: Mapping[str, object]) -> Imported:
    """The settings of the YAML; those of the launched script are reported as lost."""
    reading = _strategy(table)
    if "micro_batch" not in reading.strategy:
        reading.lose("micro_batch", "the batch_size of the script's DataLoader is not in this file")
    if "accumulate" not in reading.strategy:
        reading.lose("accumulate", _OF_SCRIPT)
    return reading.finish()


def _strategy(table: Mapping[str, object]) -> Reading:
    """Read everything in the YAML; the script decides the micro-batch."""
    reading = Reading("an accelerate configuration")
    # YAML reads a bare `no` as false.
    given = table.get("distributed_type")
    kind = "NO" if given is False else upper_case_text(table, "distributed_type", "NO")
    list_unknown(reading, table, known_keys.ACCELERATE)
    reading.machines = positive_integer(table, "num_machines") or 1
    reading.processes = (
        positive_integer(table, "num_processes") if table.get("num_processes") != -1 else None
    )
    reading.cpu = boolean(table, "use_cpu", otherwise=False) or kind == "MULTI_CPU"
    if kind == "FSDP":
        _read_fsdp(table, reading)
    elif kind in _REPLICATED:
        reading.given("distributed_type", {"kind": "ddp"}, kind, naming="value")
    elif kind == "NO":
        reading.processes = reading.machines = 1
        _set_or_default(reading, "distributed_type", given, "NO", {"kind": "single"})
    elif kind == "DEEPSPEED":
        _read_deepspeed(table, reading)
    else:
        known = ("FSDP", "DEEPSPEED", "NO", *_REPLICATED)
        hint = did_you_mean(kind, known) or (
            "; it is not data parallelism of PyTorch on GPUs or CPUs: write a run.toml for a "
            "cluster of those, or import a file with FSDP, MULTI_GPU or DEEPSPEED"
        )
        raise SpecError(f"distributed_type: {kind[:40]!r} has no counterpart in Shardwise{hint}")
    if kind != "DEEPSPEED":
        _read_precision(table, reading)
    _read_unused(table, kind, reading)
    accumulate = positive_integer(table, "gradient_accumulation_steps")
    if accumulate:
        reading.given("gradient_accumulation_steps", {"accumulate": accumulate})
    dynamo = _settings_with_prefix(subtable(table, "dynamo_config"), "dynamo_")
    list_unknown(reading, dynamo, _with_prefix("dynamo_", known_keys.DYNAMO), "dynamo_config.")
    backend = upper_case_text(dynamo, "dynamo_backend", "NO")
    if backend != "NO":
        reading.given("dynamo_backend", {"compile": True}, backend, naming="pair")
    return reading


def _set_or_default(
    reading: Reading,
    key: str,
    given: object,
    holds: object,
    fields: dict[str, object],
    why: str = "",
) -> None:
    """Set fields from a setting, or from its default if it is absent.

    `given` is the file's value, None if absent; `holds` is the value that applies.
    """
    if given is None:
        reading.default(key, fields, holds, why)
    else:
        reading.given(key, fields, holds, why, naming="pair")


def _settings_with_prefix(table: Mapping[str, object], prefix: str) -> dict[str, object]:
    """The settings with `prefix` before each name; accelerate accepts both forms."""
    return {
        name if name.startswith(prefix) else f"{prefix}{name}": value
        for name, value in table.items()
    }


def _with_prefix(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each with the prefix."""
    return tuple(f"{prefix}{name}" for name in names)


def _read_unused(table: Mapping[str, object], kind: str, reading: Reading) -> None:
    """Report sections that accelerate ignores for this `distributed_type`, and unsupported ones."""
    for owner, key in (("FSDP", "fsdp_config"), ("DEEPSPEED", "deepspeed_config")):
        if table.get(key) and kind != owner:
            reading.lose(key, f"it has no effect where distributed_type is {kind}")
    if table.get("parallelism_config") and kind not in ("FSDP", "DEEPSPEED"):
        reading.lose("parallelism_config", f"it is not read where distributed_type is {kind}")
    for key in ("fp8_config", "megatron_lm_config"):
        if table.get(key):
            reading.lose(key, "Shardwise has no counterpart")


def _read_precision(table: Mapping[str, object], reading: Reading) -> None:
    """Read `mixed_precision` as the dtypes of parameters and reductions."""
    written = table.get("mixed_precision")
    # YAML reads a bare `no` as false.
    given = "no" if written is None or written is False else plain_text(written).lower()
    if given not in PRECISION:
        raise SpecError(f"mixed_precision: {given[:40]!r} is not one of {', '.join(PRECISION)}")
    if given == "fp8":
        reading.lose("mixed_precision", "matmuls are planned in bf16", "fp8")
    dtype = PRECISION[given]
    sharded = reading.strategy["kind"] not in ("ddp", "single")
    reduce = dtype if sharded else "fp32"
    reading.strategy = {"param_dtype": dtype, "reduce_dtype": reduce, **reading.strategy}
    same = ", the dtype in which accelerate reduces" if sharded and dtype != "fp32" else ""
    dtypes: dict[str, object] = {"param_dtype": dtype, "reduce_dtype": reduce}
    _set_or_default(reading, "mixed_precision", written, given, dtypes, same)


def _read_fsdp(table: Mapping[str, object], reading: Reading) -> None:
    """Read `fsdp_config` and `parallelism_config`."""
    settings = _settings_with_prefix(subtable(table, "fsdp_config"), "fsdp_")
    list_unknown(reading, settings, _with_prefix("fsdp_", known_keys.FSDP), "fsdp_config.")
    version = positive_integer(settings, "fsdp_version") or 1
    if version > 2:
        raise SpecError(f"fsdp_version: must be 1 or 2, not {version}")
    if settings.get("fsdp_version") is None:
        reading.default("fsdp_version", {}, 1)
    if version == 1:
        _read_fsdp1(settings, reading)
    else:
        keeps = boolean(settings, "fsdp_reshard_after_forward", otherwise=True)
        said = settings.get("fsdp_reshard_after_forward")
        becomes: dict[str, object] = {"kind": "zero3" if keeps else "zero2"}
        _set_or_default(reading, "fsdp_reshard_after_forward", said, keeps, becomes)
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch"):
            if settings.get(f"fsdp_{name}") is not None:
                reading.lose(f"fsdp_{name}", "accelerate reads it with fsdp_version 1 only")
    reading.strategy |= {"grad_sync": "last", "reshard_after_backward": True}
    if version == 1 and reading.strategy["kind"] in ("zero2", "ddp"):
        # FSDP1 keeps what it gathered while gradients are not reduced.
        reading.strategy.pop("reshard_after_backward")
    reading.remark(
        "Accelerator.accumulate reduces gradients in the last micro-batch only: grad_sync = last.",
        {"grad_sync": "last"},
    )
    if reading.strategy["kind"] != "ddp":
        reading.strategy["offload"] = boolean(settings, "fsdp_offload_params", otherwise=False)
    elif boolean(settings, "fsdp_offload_params", otherwise=False):
        reading.lose("fsdp_offload_params", "Shardwise offloads sharded states only")
    recompute = boolean(settings, "fsdp_activation_checkpointing", otherwise=False)
    reading.strategy["recompute"] = "full" if recompute else "none"
    _read_units(settings, reading)
    _read_degrees(subtable(table, "parallelism_config"), reading)


def _read_fsdp1(settings: Mapping[str, object], reading: Reading) -> None:
    """Read the sharding strategy and the prefetch of FSDP1."""
    key = "fsdp_sharding_strategy"
    if settings.get(key) is None and settings.get("fsdp_reshard_after_forward") is not None:
        # Newer versions of accelerate use this key for FSDP1 too.
        key = "fsdp_reshard_after_forward"
    given = upper_case_text(settings, key, "FULL_SHARD")
    given = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(given, given)
    name = SHARDING[int(given) - 1] if given in ("1", "2", "3", "4", "5") else given
    name = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}.get(name, name)
    if name not in fsdp1.SHARDING:
        raise SpecError(
            f"{key}: {name[:40]!r} is not one of {', '.join(SHARDING)}"
            f"{did_you_mean(name, SHARDING)}"
        )
    fsdp1.set_sharding(reading, name, absent=key if settings.get(key) is None else "")
    if reading.strategy["kind"] == "ddp":
        return
    prefetch = upper_case_text(settings, "fsdp_backward_prefetch", "NO_PREFETCH")
    prefetch = {"NO_PREFETCH": "None", "1": "BACKWARD_PRE", "2": "BACKWARD_POST"}.get(
        prefetch, prefetch
    )
    if prefetch not in fsdp1.PREFETCH:
        raise SpecError(
            f"fsdp_backward_prefetch: {prefetch[:40]!r} is not one of BACKWARD_PRE, BACKWARD_POST, "
            "NO_PREFETCH"
        )
    absent = settings.get("fsdp_backward_prefetch") is None
    fsdp1.set_prefetch(reading, prefetch, absent="fsdp_backward_prefetch" if absent else "")
    if boolean(settings, "fsdp_forward_prefetch", otherwise=False):
        reading.given("fsdp_forward_prefetch", {"forward_prefetch": 1}, why=": one unit ahead")
    for name, why in fsdp1.OBSOLETE.items():
        if f"fsdp_{name}" in settings:
            reading.explain(f"fsdp_{name}", why)


def _read_units(settings: Mapping[str, object], reading: Reading) -> None:
    """Compare the FSDP units of the wrap policy with one unit per block."""
    policy = upper_case_text(settings, "fsdp_auto_wrap_policy", "NO_WRAP")
    if policy == "TRANSFORMER_BASED_WRAP":
        layer = settings.get("fsdp_transformer_layer_cls_to_wrap")
        named = f"every {layer}" if layer else "every block that the model names"
        reading.explain(_POLICY, f"{named} is one FSDP unit, as every block is in Shardwise")
    elif policy == "NO_WRAP":
        one = (
            "fsdp_auto_wrap_policy is absent: accelerate makes all blocks one unit; in Shardwise "
            "each block is a unit, which needs less memory."
        )
        reading.record(Outcome("lost", _POLICY, why=one, naming="sentence"))
    else:
        reading.lose(_POLICY, "units by size become a unit for every block", policy)
    if settings.get("fsdp_ignored_modules"):
        reading.lose("fsdp_ignored_modules", fsdp1.LOST["ignored_modules"])


def _read_degrees(table: Mapping[str, object], reading: Reading) -> None:
    """Read the degrees of `parallelism_config`."""
    if not table:
        return
    settings = _settings_with_prefix(table, _PREFIX)
    list_unknown(
        reading, settings, _with_prefix(_PREFIX, known_keys.PARALLELISM), "parallelism_config."
    )
    replicate, shard = (
        positive_integer(settings, REPLICATE) or 1,
        positive_integer(settings, SHARD) or 1,
    )
    others = read_inner_axes(settings, reading)
    if others > 1 and shard == 1 and replicate > 1:
        combined = (
            "accelerate combines it with tp_size and cp_size only where dp_shard_size is above 1; "
            "read as dp_shard_size"
        )
        key = "dp_replicate_size"
        reading.record(Outcome("lost", key, replicate, why=combined, naming="assignment"))
        replicate, shard = 1, replicate
    _set_degrees(replicate, shard, others, reading)


def read_inner_axes(settings: Mapping[str, object], reading: Reading) -> int:
    """Read tensor and context degrees.

    Returns:
        The number of devices that work on the same sequences: tensor × context.
    """
    tensor, ring, ulysses = (
        positive_integer(settings, key) or 1 for key in (TENSOR, CONTEXT, ULYSSES)
    )
    if tensor > 1:
        # transformers' plan shards matrices only, so sequence parallelism is off.
        reading.given("tp_size", {"tensor": tensor}, why=", without sequence parallelism")
        reading.strategy["sequence_parallel"] = False
    if ring > 1 and ulysses > 1:
        reading.lose("cp_size and sp_size", "accelerate takes one of them; read as cp_size")
        ulysses = 1
    if ring > 1:
        reading.given("cp_size", {"context": ring}, why=": ring attention")
        reading.strategy["context_method"] = "ring"
    if ulysses > 1:
        reading.given("sp_size", {"context": ulysses}, why=": Ulysses, by DeepSpeed")
        reading.strategy["context_method"] = "ulysses"
    return tensor * ring * ulysses


def _set_degrees(replicate: int, shard: int, others: int, reading: Reading) -> None:
    """Set shard and replicate degrees, checked against the number of processes.

    `others` is the number of devices that work on the same sequences.
    """
    said, count = f"dp_replicate_size {replicate} x dp_shard_size {shard}", reading.processes
    if replicate > 1 or shard > 1:
        reading.strategy.pop("within_node", None)
    if others > 1:
        said += f" x {others} on the same sequences"
    if count is not None and 1 < replicate * shard * others != count:
        reading.lose(
            "parallelism_config",
            f"{said} are not the {count} processes of the file; groups keep their size, and how "
            "many there are follows from the cluster",
        )
        if shard > 1 and shard < count:
            reading.strategy["shard"] = shard
        return
    if shard > 1 and replicate > 1:
        reading.given("parallelism_config", {"replicate": replicate, "shard": shard})
    elif shard > 1 and (count is None or others > 1):
        reading.given("parallelism_config", {"shard": shard})
    elif shard > 1:
        everywhere = f"dp_shard_size {shard} shards over every process"
        reading.explain("parallelism_config", everywhere)
    elif replicate > 1 and others == 1:
        for name in ("reshard_after_backward", "offload"):
            reading.strategy.pop(name, None)
        # Without sharding there are no units and no gathers.
        reading.outcomes = [
            one
            for one in reading.outcomes
            if not (one.key == _POLICY if one.is_lost else one.key.startswith("fsdp_"))
        ]
        reading.strategy["kind"] = "ddp"
        nothing = f"{said} shards nothing and becomes kind ddp"
        reading.explain("parallelism_config", nothing)


def _read_deepspeed(table: Mapping[str, object], reading: Reading) -> None:
    """Read `deepspeed_config`, whose settings are in the same file."""
    settings = subtable(table, "deepspeed_config")
    if settings.get("deepspeed_config_file"):
        raise SpecError(
            "deepspeed_config: the settings are in "
            f"{str(settings['deepspeed_config_file'])[:80]}; import that file"
        )
    devices = {
        f"offload_{part}": {"device": settings.get(f"offload_{part}_device", "none")}
        for part in ("optimizer", "param")
    }
    list_unknown(reading, settings, known_keys.ACCELERATE_DEEPSPEED, "deepspeed_config.")
    if settings.get("zero_stage") is None:
        reading.default("zero_stage", {}, 2)
    precision = plain_text(table.get("mixed_precision") or "no").lower()
    if precision not in PRECISION:
        raise SpecError(f"mixed_precision: {precision[:40]!r} is not one of {', '.join(PRECISION)}")
    if precision == "fp8":
        reading.lose("mixed_precision", "matmuls are planned in bf16", "fp8")
        precision = "bf16"
    if settings.get("gradient_accumulation_steps") is None:
        reading.lose("accumulate", _OF_SCRIPT)
    inside = deepspeed.read(
        {
            "zero_optimization": {"stage": settings.get("zero_stage", 2), **devices},
            "gradient_accumulation_steps": settings.get("gradient_accumulation_steps", "auto"),
            **{key: settings[key] for key in ("gradient_clipping",) if key in settings},
            **({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}),
        }
    )
    reading.add_nested(inside, without=("micro_batch", "accumulate"))
    read_inner_axes(_settings_with_prefix(subtable(table, "parallelism_config"), _PREFIX), reading)
