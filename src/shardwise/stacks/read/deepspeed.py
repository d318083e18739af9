"""Read a DeepSpeed JSON configuration as settings of a run."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import Outcome, plain_text, repr_text
from shardwise.stacks.read import known_keys
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    boolean,
    finite_number,
    list_unknown,
    positive_integer,
    set_optimizer,
    set_warmup,
    subtable,
)

KINDS = ("ddp", "zero1", "zero2", "zero3")
# DeepSpeed's Adam is AdamW unless adam_w_mode is false.
OPTIMIZERS: dict[Optimizer, tuple[str, dict[str, object]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {"adam_w_mode": False}),
    "lion": ("Lion", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {}),
}
_OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "momentum", "bias_correction",
                     "torch_adam", "fused")  # fmt: skip
_SCHEDULER_PARAMS = ("total_num_steps", "warmup_num_steps", "warmup_type", "cos_min_ratio",
                     "warmup_min_ratio", "warmup_min_lr", "warmup_max_lr",
                     "last_batch_iteration")  # fmt: skip
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients",
              "zero_quantized_nontrainable_weights")  # fmt: skip
_WITHOUT_COUNTERPART = ("prescale_gradients", "gradient_predivide_factor", "compression_training",
                        "sparse_attention", "sparse_gradients", "amp", "progressive_layer_drop",
                        "curriculum_learning", "data_efficiency", "eigenvalue", "hybrid_engine",
                        "compile")  # fmt: skip
# The reason given for a value "auto", which sets nothing.
AUTO = "auto is decided when the script runs"
AUTOCAST = {low: TORCH_NAMES[low] for low in ("bf16", "fp16")}


def read(table: Mapping[str, object]) -> Imported:
    """The settings of the JSON.

    A value "auto" is reported as lost; callers that know it replace it first.
    """
    reading = Reading("a DeepSpeed configuration")
    zero = subtable(table, "zero_optimization")
    list_unknown(reading, table, known_keys.DEEPSPEED)
    list_unknown(reading, zero, known_keys.ZERO, "zero_optimization.")
    for part in ("offload_optimizer", "offload_param"):
        where = f"zero_optimization.{part}."
        list_unknown(reading, subtable(zero, part), known_keys.OFFLOAD, where)
    for name in ("bf16", "bfloat16", "fp16", "torch_autocast"):
        list_unknown(reading, subtable(table, name), known_keys.PRECISION, f"{name}.")
    _read_stage(zero, reading)
    _read_batch(table, reading, _read_inner_axes(table, reading))
    _read_precision(table, reading)
    _read_offload(zero, reading)
    _read_train(table, reading)
    for key in ("pipeline", "expert_parallel"):
        if table.get(key):
            reading.lose(key, "Shardwise has no counterpart")
    for key in _QUANTIZED:
        if boolean(zero, key, otherwise=False):
            reading.lose(key, "Shardwise quantizes nothing")
    if zero.get("zenflow"):
        reading.lose("zenflow", "Shardwise does not delay the optimizer step")
    for key in _WITHOUT_COUNTERPART:
        if table.get(key) not in (None, False, 1, 1.0) or table.get(key) is True:
            reading.lose(key, "Shardwise has no counterpart")
    if table.get("activation_checkpointing"):
        reading.lose(
            "activation_checkpointing",
            "it configures what the script may or may not call; set recompute yourself",
        )
    return reading.finish()


def read_file(table: Mapping[str, object]) -> Imported:
    """The settings of a JSON on its own: without a scheduler its learning rate stays.

    Inside another stack's file, that stack decides the schedule.
    """
    found = read(table)
    if not table.get("optimizer") or table.get("scheduler"):
        return found
    constant: dict[str, object] = {"train.schedule": "constant"}
    outcome = Outcome("default", "scheduler", fields=constant)
    train = {**found.train, "schedule": "constant"}
    return found._replace(train=train, outcomes=(*found.outcomes, outcome))


def _read_inner_axes(table: Mapping[str, object], reading: Reading) -> int:
    """Read tensor parallelism (AutoTP) and Ulysses, which DeepSpeed calls sequence parallelism.

    Returns:
        The number of devices that work on the same sequences: tensor × context.
    """
    automatic = subtable(table, "tensor_parallel")
    tensor = positive_integer(automatic, "autotp_size", "tensor_parallel.") or 1
    list_unknown(reading, automatic, known_keys.TENSOR_PARALLEL, "tensor_parallel.")
    if tensor > 1:
        more = ", without sequence parallelism"
        reading.given("autotp_size", {"tensor": tensor}, why=more)
        reading.strategy["sequence_parallel"] = False
    context = positive_integer(table, "sequence_parallel_size") or 1
    if context > 1:
        reading.given("sequence_parallel_size", {"context": context}, why=": Ulysses")
        reading.strategy["context_method"] = "ulysses"
    return tensor * context


def _read_stage(zero: Mapping[str, object], reading: Reading) -> None:
    """Read the ZeRO stage, and the sizes of hpZ and MiCS groups. Stage 0 is DDP."""
    given = zero.get("stage")
    stage = 0 if given is None else given
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise SpecError(f"zero_optimization.stage: must be 0, 1, 2 or 3, not {repr_text(stage)}")
    kind = KINDS[int(stage)]
    if given is None:
        reading.default("zero_optimization.stage", {"kind": kind}, 0)
    else:
        reading.given("ZeRO stage", {"kind": kind}, int(stage), naming="pair")
    group = positive_integer(zero, "zero_hpz_partition_size", "zero_optimization.") or 1
    if kind == "zero3" and group > 1:
        more = ": the backward gathers from that many devices"
        fields = {"reshard_after_forward": group}
        reading.given("zero_hpz_partition_size", fields, why=more)
    mics = zero.get("mics_shard_size", -1)
    if isinstance(mics, int) and mics > 0 and kind != "zero3":
        reading.lose("mics_shard_size", "it has no effect below stage 3")
    elif isinstance(mics, int) and mics > 0:
        more = ", replicated over the other devices"
        reading.given("mics_shard_size", {"shard": mics}, why=more)
    if kind == "zero3":
        reading.explain(
            "stage3_* sizes", "Shardwise gathers units of one block each, one unit ahead"
        )


def _read_batch(table: Mapping[str, object], reading: Reading, inner: int) -> None:
    """Read micro-batch and accumulation; compute the number of processes from the global batch.

    Each sequence is on `inner` devices: tensor × context.
    """
    batch = positive_integer(table, "train_batch_size")
    micro = positive_integer(table, "train_micro_batch_size_per_gpu")
    accumulate = positive_integer(table, "gradient_accumulation_steps")
    if accumulate is None and table.get("gradient_accumulation_steps") != "auto" and micro:
        # A global batch and the device count determine it, but the count is not in the file.
        accumulate = 1 if batch is None else None
    if micro:
        reading.given("train_micro_batch_size_per_gpu", {"micro_batch": micro})
    else:
        reading.lose("micro_batch", "train_micro_batch_size_per_gpu is not a number in this file")
    if accumulate:
        absent = table.get("gradient_accumulation_steps") is None
        settles = reading.default if absent else reading.given
        settles("gradient_accumulation_steps", {"accumulate": accumulate})
    else:
        reading.lose("accumulate", "gradient_accumulation_steps is not a number in this file")
    if batch and micro and accumulate:
        if batch % (micro * accumulate):
            raise SpecError(
                f"train_batch_size: {batch} is no multiple of train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps = {micro * accumulate}"
            )
        reading.processes = batch // (micro * accumulate) * inner
        if reading.processes == 1 and reading.strategy["kind"] == "ddp":
            reading.strategy["kind"] = "single"


def _read_precision(table: Mapping[str, object], reading: Reading) -> None:
    """Read the dtypes of parameters, reductions and master weights."""
    chosen, automatic = _enabled(table, reading)
    low = chosen[0] if chosen else "fp32"
    autocast = subtable(table, "torch_autocast")
    by_autocast = boolean(autocast, "enabled", otherwise=False, where="torch_autocast.")
    if automatic and not chosen and not by_autocast:
        reading.lose(
            "param_dtype, reduce_dtype", "the file does not settle them; set them yourself"
        )
        return
    if by_autocast:
        names = {long: short for short, long in AUTOCAST.items()}
        given = plain_text(autocast.get("dtype", "bfloat16")).rpartition(".")[2]
        low = names.get(given, given)
        if low not in AUTOCAST:
            raise SpecError(f"torch_autocast.dtype: {given[:40]!r} is not bfloat16 or float16")
        reading.strategy["reduce_dtype"] = "fp32"
    asked = table.get("communication_data_type")
    reduce = (
        reading.strategy.get("reduce_dtype", low) if asked is None else plain_text(asked).lower()
    )
    if reduce not in ("fp32", "bf16", "fp16"):
        raise SpecError(
            f"communication_data_type: {plain_text(asked)[:40]!r} is not fp32, bf16 or fp16"
        )
    dtypes = {"param_dtype": low, "reduce_dtype": reduce}
    if chosen or by_autocast or asked is not None:
        reading.given("Precision", dtypes)
    else:
        reading.remark(
            "No low precision is enabled, so the default becomes param_dtype = fp32, "
            "reduce_dtype = fp32.",
            dtypes,
        )
    for name in ("bf16", "fp16"):
        if boolean(subtable(table, name), f"{name}_master_weights_and_grads", otherwise=False):
            reading.given(f"{name}_master_weights_and_grads", {"master_dtype": name})


def _enabled(table: Mapping[str, object], reading: Reading) -> tuple[list[str], bool]:
    """The low precisions that are enabled, and whether "auto" or amp may enable one at run time."""
    chosen, automatic = [], bool(subtable(table, "amp").get("enabled"))
    for name, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if subtable(table, name).get("enabled") == "auto":
            automatic = True
            reading.lose(f"{name}.enabled", AUTO)
        elif boolean(subtable(table, name), "enabled", otherwise=False, where=f"{name}."):
            chosen.append(dtype)
    if len(set(chosen)) > 1:
        reading.lose(
            "bf16 and fp16", "both are enabled, which DeepSpeed refuses; read as bf16. Keep one"
        )
    return chosen, automatic


def _read_offload(zero: Mapping[str, object], reading: Reading) -> None:
    """Read offload of optimizer states or parameters to host memory or NVMe."""
    where = {
        part: plain_text(subtable(zero, f"offload_{part}").get("device") or "none").lower()
        for part in ("optimizer", "param")
    }
    # Names in older files.
    names = {part: f"offload_{part}" for part in where}
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param"),
                      ("cpu_offload_params", "param")):  # fmt: skip
        if boolean(zero, old, otherwise=False, where="zero_optimization."):
            where[part], names[part] = "cpu", old
    for part, device in where.items():
        if device not in ("none", "cpu", "nvme"):
            raise SpecError(
                f"zero_optimization.offload_{part}.device: {device[:40]!r} is not none, cpu or nvme"
            )
    used = {part: device for part, device in where.items() if device != "none"}
    if not used:
        return
    if reading.strategy["kind"] == "ddp":
        reading.lose("offload", "Shardwise offloads sharded states only")
        return
    inner = any(reading.strategy.get(axis, 1) != 1 for axis in ("tensor", "context"))
    alone = [*used] == ["optimizer"] and not inner
    offload = "optimizer" if alone else True
    reading.given(" and ".join(names[part] for part in used), {"offload": offload})
    if len(used) == 1 and not alone:
        reading.lose(
            "offload",
            "Shardwise offloads parameters, gradients and optimizer states together, not only the "
            f"{'optimizer' if 'optimizer' in used else 'parameters'}",
        )
    if "nvme" in used.values():
        reading.lose("offload", "Shardwise offloads to host memory, not to NVMe")


def _read_train(table: Mapping[str, object], reading: Reading) -> None:
    """Read gradient clipping, the optimizer and the learning rate schedule."""
    clip = finite_number(table, "gradient_clipping")
    if table.get("gradient_clipping") == "auto":
        reading.lose("gradient_clipping", AUTO)
    if clip is None and table.get("optimizer") and "gradient_clipping" not in table:
        reading.default("gradient_clipping", {"train.clip_norm": 1.0})
    elif clip is not None:
        reading.train["clip_norm"] = clip
    optimizer = subtable(table, "optimizer")
    if optimizer:
        _read_optimizer(optimizer, reading)
    scheduler = subtable(table, "scheduler")
    if scheduler:
        _read_scheduler(scheduler, reading)


def _read_optimizer(optimizer: Mapping[str, object], reading: Reading) -> None:
    name, settings = plain_text(optimizer.get("type", "")), subtable(optimizer, "params")
    kinds = {theirs.lower(): ours for ours, (theirs, _) in reversed(OPTIMIZERS.items())}
    kind = kinds.get(name.lower())
    if kind is None:
        hint = "; set job.optimizer, else it is adamw."
        reading.record(Outcome("unknown", f"optimizer {name[:40]}", why=hint))
        return
    if kind == "adam" and boolean(settings, "adam_w_mode", otherwise=True):
        kind = "adamw"
        reading.remark("DeepSpeed's Adam is AdamW unless adam_w_mode is false.")
    momentum = finite_number(settings, "momentum")
    if kind == "sgd" and momentum:
        kind = "momentum"
        reading.train["momentum"] = momentum
    reading.given("optimizer", {"job.optimizer": kind}, name, naming="pair")
    for key, value in settings.items():
        if value == "auto":
            reading.lose(f"optimizer.params.{key}", AUTO)
    more = (*_OPTIMIZER_PARAMS, *(("adam_w_mode",) if kind in ("adam", "adamw") else ()))
    list_unknown(reading, settings, more, "optimizer.params.")
    set_optimizer(
        reading,
        lambda key: finite_number(settings, key, "optimizer.params."),
        settings.get("betas"),
    )


def _read_scheduler(scheduler: Mapping[str, object], reading: Reading) -> None:
    name, settings = plain_text(scheduler.get("type", "")), subtable(scheduler, "params")
    schedules = {"WarmupLR": "constant", "WarmupCosineLR": "cosine", "WarmupDecayLR": "linear"}
    if name not in schedules:
        hint = "; set train.schedule and warmup_steps."
        reading.record(Outcome("unknown", f"scheduler {name[:40]}", why=hint))
        return
    for key, value in settings.items():
        if value == "auto":
            reading.lose(f"scheduler.params.{key}", AUTO)
    list_unknown(reading, settings, _SCHEDULER_PARAMS, "scheduler.params.")
    steps = positive_integer(settings, "total_num_steps", "scheduler.params.")
    warmup = positive_integer(settings, "warmup_num_steps", "scheduler.params.")
    if steps is not None:
        reading.train["steps"] = steps
    if warmup is not None:
        set_warmup(reading, warmup)
    linear = schedules[name] == "linear"
    final = 0.0 if linear else finite_number(settings, "cos_min_ratio", "scheduler.params.")
    if final is not None:
        reading.train["final_learning_rate"] = final
    if str(settings.get("warmup_type", "log")) != "linear":
        reading.lose("scheduler", "Shardwise warms up linearly, not logarithmically")
    reading.given("scheduler", {"train.schedule": schedules[name]}, name, naming="pair")
