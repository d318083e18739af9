"""Read the YAML of `accelerate config` as settings of a run."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.stacks.read import deepspeed, fsdp1, known_keys
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    flag,
    list_unknown,
    plain,
    section,
    whole,
    word,
)

PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
# Accelerate counts FSDP1's sharding strategies from 1, in this order.
SHARDING = tuple(fsdp1.SHARDING)
_REPLICATED = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
               "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")  # fmt: skip
_PREFIX = "parallelism_config_"
REPLICATE, SHARD = f"{_PREFIX}dp_replicate_size", f"{_PREFIX}dp_shard_size"
TENSOR, CONTEXT, ULYSSES = (f"{_PREFIX}{axis}_size" for axis in ("tp", "cp", "sp"))


def read(table: Mapping[str, object]) -> Imported:
    """The settings of the YAML; those of the script that accelerate starts are not in it."""
    reading = _strategy(table)
    if "micro_batch" not in reading.strategy:
        reading.drop("micro_batch: the batch_size of the script's DataLoader is not in this file.")
    if "accumulate" not in reading.strategy:
        reading.drop("accumulate: gradient_accumulation_steps of the script is not in this file.")
    return reading.done()


def _strategy(table: Mapping[str, object]) -> Reading:
    reading = Reading("an accelerate configuration")
    # YAML reads a bare `no` as false.
    given = table.get("distributed_type")
    kind = "NO" if given is False else word(table, "distributed_type", "NO")
    list_unknown(reading, table, known_keys.ACCELERATE)
    reading.machines = whole(table, "num_machines") or 1
    reading.processes = whole(table, "num_processes") if table.get("num_processes") != -1 else None
    reading.cpu = flag(table, "use_cpu", otherwise=False) or kind == "MULTI_CPU"
    if kind == "FSDP":
        _read_fsdp(table, reading)
    elif kind in _REPLICATED:
        reading.strategy["kind"] = "ddp"
        reading.note(f"{kind} becomes kind ddp.")
    elif kind == "NO":
        reading.strategy["kind"] = "single"
        reading.processes = reading.machines = 1
        _say(reading, "distributed_type", given, "NO", "kind single")
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
    accumulate = whole(table, "gradient_accumulation_steps")
    if accumulate:
        reading.strategy["accumulate"] = accumulate
        reading.note(f"gradient_accumulation_steps becomes accumulate = {accumulate}.")
    dynamo = _named(section(table, "dynamo_config"), "dynamo_")
    list_unknown(reading, dynamo, _with("dynamo_", known_keys.DYNAMO), "dynamo_config.")
    backend = word(dynamo, "dynamo_backend", "NO")
    if backend != "NO":
        reading.strategy["compile"] = True
        reading.note(f"dynamo_backend {backend} becomes compile = true.")
    return reading


def _say(reading: Reading, key: str, given: object, holds: str, becomes: str) -> None:
    """That a setting becomes something, or that its default does."""
    if given is None:
        reading.note(f"{key} is absent, so its default {holds} becomes {becomes}.")
    else:
        reading.note(f"{key} {holds} becomes {becomes}.")


def _named(table: Mapping[str, object], prefix: str) -> dict[str, object]:
    """The settings under their full names; accelerate takes both."""
    return {
        name if name.startswith(prefix) else f"{prefix}{name}": value
        for name, value in table.items()
    }


def _with(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names)


def _read_unused(table: Mapping[str, object], kind: str, reading: Reading) -> None:
    """Sections that accelerate itself does not look at, or that have no counterpart."""
    for owner, key in (("FSDP", "fsdp_config"), ("DEEPSPEED", "deepspeed_config")):
        if table.get(key) and kind != owner:
            reading.drop(f"{key}: it has no effect where distributed_type is {kind}.")
    if table.get("parallelism_config") and kind not in ("FSDP", "DEEPSPEED"):
        reading.drop(f"parallelism_config: it is not read where distributed_type is {kind}.")
    for key in ("fp8_config", "megatron_lm_config"):
        if table.get(key):
            reading.drop(f"{key}: Shardwise has no counterpart.")


def _read_precision(table: Mapping[str, object], reading: Reading) -> None:
    written = table.get("mixed_precision")
    # YAML reads a bare `no` as false.
    given = "no" if written is None or written is False else plain(written).lower()
    if given not in PRECISION:
        raise SpecError(f"mixed_precision: {given[:40]!r} is not one of {', '.join(PRECISION)}")
    if given == "fp8":
        reading.drop("mixed_precision fp8: matmuls are planned in bf16.")
    dtype = PRECISION[given]
    sharded = reading.strategy["kind"] not in ("ddp", "single")
    reduce = dtype if sharded else "fp32"
    reading.strategy = {"param_dtype": dtype, "reduce_dtype": reduce, **reading.strategy}
    same = ", the dtype in which accelerate reduces" if sharded and dtype != "fp32" else ""
    becomes = f"param_dtype = {dtype}, reduce_dtype = {reduce}{same}"
    _say(reading, "mixed_precision", written, given, becomes)


def _read_fsdp(table: Mapping[str, object], reading: Reading) -> None:
    settings = _named(section(table, "fsdp_config"), "fsdp_")
    list_unknown(reading, settings, _with("fsdp_", known_keys.FSDP), "fsdp_config.")
    version = whole(settings, "fsdp_version") or 1
    if version > 2:
        raise SpecError(f"fsdp_version: must be 1 or 2, not {version}")
    if settings.get("fsdp_version") is None:
        reading.note("fsdp_version is absent, so its default 1 holds.")
    if version == 1:
        _read_fsdp1(settings, reading)
    else:
        keeps = flag(settings, "fsdp_reshard_after_forward", otherwise=True)
        reading.strategy["kind"] = "zero3" if keeps else "zero2"
        said = settings.get("fsdp_reshard_after_forward")
        becomes = f"kind {reading.strategy['kind']}"
        _say(reading, "fsdp_reshard_after_forward", said, str(keeps).lower(), becomes)
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch"):
            if settings.get(f"fsdp_{name}") is not None:
                reading.drop(f"fsdp_{name}: accelerate reads it with fsdp_version 1 only.")
    reading.strategy |= {"grad_sync": "last", "reshard_after_backward": True}
    if version == 1 and reading.strategy["kind"] in ("zero2", "ddp"):
        # FSDP1 keeps what it gathered while gradients are not reduced.
        reading.strategy.pop("reshard_after_backward")
    reading.note(
        "Accelerator.accumulate reduces gradients in the last micro-batch only: grad_sync = last."
    )
    if reading.strategy["kind"] != "ddp":
        reading.strategy["offload"] = flag(settings, "fsdp_offload_params", otherwise=False)
    elif flag(settings, "fsdp_offload_params", otherwise=False):
        reading.drop("fsdp_offload_params: Shardwise offloads sharded states only.")
    recompute = flag(settings, "fsdp_activation_checkpointing", otherwise=False)
    reading.strategy["recompute"] = "full" if recompute else "none"
    _read_units(settings, reading)
    _read_degrees(section(table, "parallelism_config"), reading)


def _read_fsdp1(settings: Mapping[str, object], reading: Reading) -> None:
    key = "fsdp_sharding_strategy"
    if settings.get(key) is None and settings.get("fsdp_reshard_after_forward") is not None:
        # Where newer versions of accelerate write it, for FSDP1 too.
        key = "fsdp_reshard_after_forward"
    given = word(settings, key, "FULL_SHARD")
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
    prefetch = word(settings, "fsdp_backward_prefetch", "NO_PREFETCH")
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
    if flag(settings, "fsdp_forward_prefetch", otherwise=False):
        reading.strategy["forward_prefetch"] = 1
        reading.note("fsdp_forward_prefetch becomes forward_prefetch = 1: one unit ahead.")
    for name, why in fsdp1.OBSOLETE.items():
        if f"fsdp_{name}" in settings:
            reading.note(f"fsdp_{name}: {why}.")


def _read_units(settings: Mapping[str, object], reading: Reading) -> None:
    policy = word(settings, "fsdp_auto_wrap_policy", "NO_WRAP")
    if policy == "TRANSFORMER_BASED_WRAP":
        layer = settings.get("fsdp_transformer_layer_cls_to_wrap")
        named = f"every {layer}" if layer else "every block that the model names"
        reading.note(
            f"fsdp_auto_wrap_policy: {named} is one FSDP unit, as every block is in Shardwise."
        )
    elif policy == "NO_WRAP":
        reading.drop(
            "fsdp_auto_wrap_policy is absent: accelerate makes all blocks one unit; in Shardwise "
            "each block is a unit, which needs less memory."
        )
    else:
        reading.drop(
            f"fsdp_auto_wrap_policy {policy}: units by size become a unit for every block."
        )
    if settings.get("fsdp_ignored_modules"):
        reading.drop(f"fsdp_ignored_modules: {fsdp1.LOST['ignored_modules']}.")


def _read_degrees(table: Mapping[str, object], reading: Reading) -> None:
    if not table:
        return
    settings = _named(table, _PREFIX)
    list_unknown(reading, settings, _with(_PREFIX, known_keys.PARALLELISM), "parallelism_config.")
    replicate, shard = whole(settings, REPLICATE) or 1, whole(settings, SHARD) or 1
    others = read_inner_axes(settings, reading)
    if others > 1 and shard == 1 and replicate > 1:
        reading.drop(
            f"dp_replicate_size = {replicate}: accelerate combines it with tp_size and cp_size "
            "only where dp_shard_size is above 1; read as dp_shard_size."
        )
        replicate, shard = 1, replicate
    _set_degrees(replicate, shard, others, reading)


def read_inner_axes(settings: Mapping[str, object], reading: Reading) -> int:
    """Tensor and context degrees; returns how many devices work on the same sequences."""
    tensor, ring, ulysses = (whole(settings, key) or 1 for key in (TENSOR, CONTEXT, ULYSSES))
    if tensor > 1:
        # Whatever reads the model's plan: transformers divides matrices, and nothing between them.
        reading.strategy |= {"tensor": tensor, "sequence_parallel": False}
        reading.note(f"tp_size becomes tensor = {tensor}, without sequence parallelism.")
    if ring > 1 and ulysses > 1:
        reading.drop("cp_size and sp_size: accelerate takes one of them; read as cp_size.")
        ulysses = 1
    if ring > 1:
        reading.strategy |= {"context": ring, "context_method": "ring"}
        reading.note(f"cp_size becomes context = {ring}: ring attention.")
    if ulysses > 1:
        reading.strategy |= {"context": ulysses, "context_method": "ulysses"}
        reading.note(f"sp_size becomes context = {ulysses}: Ulysses, by DeepSpeed.")
    return tensor * ring * ulysses


def _set_degrees(replicate: int, shard: int, others: int, reading: Reading) -> None:
    said, count = f"dp_replicate_size {replicate} x dp_shard_size {shard}", reading.processes
    if replicate > 1 or shard > 1:
        reading.strategy.pop("within_node", None)
    if others > 1:
        said += f" x {others} on the same sequences"
    if count is not None and 1 < replicate * shard * others != count:
        reading.drop(
            f"parallelism_config: {said} are not the {count} processes of the file; groups keep "
            "their size, and how many there are follows from the cluster."
        )
        if shard > 1 and shard < count:
            reading.strategy["shard"] = shard
        return
    if shard > 1 and replicate > 1:
        reading.strategy |= {"replicate": replicate, "shard": shard}
        reading.note(f"parallelism_config becomes replicate = {replicate}, shard = {shard}.")
    elif shard > 1 and (count is None or others > 1):
        reading.strategy["shard"] = shard
        reading.note(f"parallelism_config becomes shard = {shard}.")
    elif shard > 1:
        reading.note(f"parallelism_config: dp_shard_size {shard} shards over every process.")
    elif replicate > 1 and others == 1:
        for name in ("reshard_after_backward", "offload"):
            reading.strategy.pop(name, None)
        reading.strategy["kind"] = "ddp"
        # Without sharding there are no units and no gathers.
        reading.notes = [note for note in reading.notes if not note.startswith("fsdp_")]
        reading.unsupported = [
            sentence for sentence in reading.unsupported if "fsdp_auto_wrap_policy" not in sentence
        ]
        reading.note(f"parallelism_config: {said} shards nothing and becomes kind ddp.")


def _read_deepspeed(table: Mapping[str, object], reading: Reading) -> None:
    settings = section(table, "deepspeed_config")
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
        reading.note("zero_stage is absent, so its default 2 holds.")
    precision = plain(table.get("mixed_precision") or "no").lower()
    if precision not in PRECISION:
        raise SpecError(f"mixed_precision: {precision[:40]!r} is not one of {', '.join(PRECISION)}")
    if precision == "fp8":
        reading.drop("mixed_precision fp8: matmuls are planned in bf16.")
        precision = "bf16"
    if settings.get("gradient_accumulation_steps") is None:
        reading.drop("accumulate: gradient_accumulation_steps of the script is not in this file.")
    inside = deepspeed.read(
        {
            "zero_optimization": {"stage": settings.get("zero_stage", 2), **devices},
            "gradient_accumulation_steps": settings.get("gradient_accumulation_steps", "auto"),
            **{key: settings[key] for key in ("gradient_clipping",) if key in settings},
            **({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}),
        }
    )
    reading.take(inside, but=("micro_batch", "accumulate"))
    read_inner_axes(_named(section(table, "parallelism_config"), _PREFIX), reading)
