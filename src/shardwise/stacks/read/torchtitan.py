"""Read a torchtitan configuration file (a Python function that returns Trainer.Config)."""

from __future__ import annotations

from typing import Any

from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.strategy import Strategy
from shardwise.stacks.experts import set_dispatch, set_experts
from shardwise.stacks.read.imported import Imported, Reading, finite_number, set_optimizer
from shardwise.stacks.read.source import Call, Script, unused_reason
from shardwise.stacks.read.titan_recipe import set_lengths, set_model, set_recipe

_DTYPES: dict[str, str] = {long: short for short, long in TORCH_NAMES.items()}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}


def is_torchtitan(script: Script) -> bool:
    """Whether a script configures torchtitan's trainer."""
    return any(call.origin.startswith("torchtitan.") for call in script.calls("ParallelismConfig"))


def read(script: Script) -> Imported:
    """The settings of a torchtitan configuration: strategy, batch, lengths and optimizer."""
    reading = Reading("a torchtitan configuration")
    parallelism, training = (
        next(iter(script.calls(name)), Call(name, (), {}))
        for name in ("ParallelismConfig", "TrainingConfig")
    )
    read_layout(parallelism, reading)
    read_training(training, reading)
    read_experts(parallelism, reading)
    _optimizer(script, reading)
    set_lengths(_settled(training, ("seq_len", "steps"), reading), reading)
    schedule = _of_class(script, "LRSchedulersContainer").keywords
    seed = next(iter(script.calls("DebugConfig")), Call("", (), {})).get("seed")
    set_recipe(training.keywords, schedule, seed, reading)
    for call in script.calls("model_registry"):
        set_model(call.origin.split(".")[-2], call.get("flavor", 0), reading)
        set_dispatch(reading, "moe_comm_backend", call.get("moe_comm_backend"))
    policies = [call for call in script.calls("Config") if ".activation_checkpoint." in call.origin]
    names = [call.origin.split(".")[-2] for call in policies]
    reading.strategy["recompute"] = (
        "full" if "FullAC" in names else "selective" if "SelectiveAC" in names else "none"
    )
    for call in script.calls("CompileConfig"):
        reading.strategy["compile"] = call.get("enable") is True
    for call in script.calls("Config"):
        if call.origin.split(".")[-2:-1] == ["ChunkedLossWrapper"]:
            reading.strategy["loss"] = "chunked"
            reading.strategy["loss_chunks"] = _count(call, "num_chunks", 8, reading)
    return reading.finish()


def _of_class(script: Script, owner: str) -> Call:
    """The first call of the `Config` of a class; a call without arguments if there is none."""
    calls = (call for call in script.calls("Config") if call.origin.split(".")[-2:-1] == [owner])
    return next(calls, Call("Config", (), {}))


def _settled(call: Call, keys: tuple[str, ...], reading: Reading) -> dict[str, int]:
    """The whole numbers among these arguments; others are reported as lost."""
    found = {key: _count(call, key, 0, reading) for key in keys if call.get(key) is not None}
    return {key: value for key, value in found.items() if value > 0}


def read_layout(call: Call, reading: Reading) -> None:
    """Read how a step is divided: the kind, the degrees, and when gradients are reduced."""
    _parallelism(call, reading)
    # torchtitan reduces gradients in every micro-batch and gathers parameters for each again.
    every = {"grad_sync": "every"}
    reading.remark("torchtitan reduces gradients in every micro-batch: grad_sync = every.", every)
    if reading.strategy["kind"] != "ddp":
        reading.strategy["reshard_after_backward"] = True


def _parallelism(call: Call, reading: Reading) -> None:
    """Read the kind and the degrees from a call of ParallelismConfig."""
    shard = _count(call, "data_parallel_shard_degree", -1, reading)
    replicate = _count(call, "data_parallel_replicate_degree", 1, reading)
    keeps = call.get("fsdp_reshard_after_forward") == "never"
    inner = _inner_axes(call, reading)
    context = reading.strategy.get("context", 1)
    if shard == context == 1:
        # fully_shard on groups of one device: gradients are all-reduced, nothing is sharded.
        reading.strategy["kind"] = "ddp" if replicate * inner > 1 else "single"
    else:
        # Devices of a context group shard the states too.
        reading.strategy["kind"] = "zero2" if keeps else "zero3"
        if shard > 0:
            reading.strategy |= {"shard": shard, "replicate": replicate}
    if shard > 0:
        reading.processes = shard * replicate * inner
    kind = reading.strategy["kind"]
    reading.remark(
        f"data_parallel_shard_degree {shard} and data_parallel_replicate_degree {replicate} become "
        f"kind {kind}.",
        {"kind": kind},
    )


def _inner_axes(call: Call, reading: Reading) -> int:
    """Read tensor and context degrees.

    Returns:
        The number of devices that work on the same sequences: tensor × context.
    """
    tensor = max(1, _count(call, "tensor_parallel_degree", 1, reading))
    context = max(1, _count(call, "context_parallel_degree", 1, reading))
    if tensor > 1:
        divided = call.get("enable_sequence_parallel") is not False
        reading.given("tensor_parallel_degree", {"tensor": tensor})
        reading.strategy["sequence_parallel"] = divided
        if call.get("enable_async_tensor_parallel") is True:
            reading.lose("enable_async_tensor_parallel", "Shardwise does not split collectives")
        if call.get("disable_loss_parallel") is True:
            reading.lose("disable_loss_parallel", "Shardwise divides the loss by vocabulary")
    if context > 1:
        reading.given("context_parallel_degree", {"context": context}, why=": ring attention")
        reading.strategy["context_method"] = "ring"
    if _count(call, "pipeline_parallel_degree", 1, reading) > 1:
        reading.lose("pipeline_parallel_degree", "Shardwise has no counterpart")
    return tensor * context


def read_experts(call: Call, reading: Reading) -> None:
    """Read the expert degree from the arguments of ParallelismConfig, after everything else."""
    key = "expert_parallel_degree"
    set_experts(reading, key, max(1, _count(call, key, 1, reading)))


def read_training(call: Call, reading: Reading) -> None:
    """Read dtypes, offload and batch from the arguments of TrainingConfig."""
    for key, field, default in (
        ("dtype", "master_dtype", "float32"),
        ("mixed_precision_param", "param_dtype", "bfloat16"),
        ("mixed_precision_reduce", "reduce_dtype", "float32"),
    ):
        value = call.get(key)
        name = default if value is None else value
        if name in _DTYPES:
            reading.strategy[field] = _DTYPES[name]
        else:
            reading.lose(key, f"{unused_reason(value)}; set strategy.{field}")
    if reading.strategy["kind"] not in ("ddp", "single"):
        reading.strategy["offload"] = call.get("enable_cpu_offload") is True
    micro = _count(call, "local_batch_size", 8, reading)
    reading.strategy["micro_batch"] = micro
    total = _count(call, "global_batch_size", -1, reading)
    ranks = reading.processes
    if ranks is not None:
        ranks //= Strategy.read(reading.strategy).mesh.inner
    if total > 0 and ranks is not None and total % (micro * ranks) == 0:
        reading.strategy["accumulate"] = total // (micro * ranks)
    elif total > 0:
        reading.lose("accumulate", "global_batch_size does not settle it; set strategy.accumulate")


def _optimizer(script: Script, reading: Reading) -> None:
    """Set the optimizer, if all parameter groups use the same one; else report it as lost."""
    names = {call.get("optimizer_name") for call in script.calls("ParamGroupConfig")} - {None}
    known = sorted(OPTIMIZERS[name] for name in names if name in OPTIMIZERS)
    if len(names) == len(known) == 1:
        reading.job["optimizer"] = known[0]
        _hyperparameters(script, reading)
    elif names:
        shown = ", ".join(sorted(str(name) for name in names))
        reading.lose("optimizer_name", f"{shown} has no counterpart; set job.optimizer")


def _hyperparameters(script: Script, reading: Reading) -> None:
    """Read the learning rate and its like, if all parameter groups share them."""
    groups = [call.get("optimizer_kwargs") for call in script.calls("ParamGroupConfig")]
    if any(not isinstance(group, dict) or group != groups[0] for group in groups):
        reading.lose("optimizer_kwargs", "they differ, or are known only at run time")
        return
    table = {name: value for name, value in groups[0].items() if isinstance(value, (int, float))}
    set_optimizer(reading, lambda key: finite_number(table, key), groups[0].get("betas"))


def _count(call: Call, key: str, default: int, reading: Reading) -> int:
    """An integer argument, -1 or at least 1; `default` if it is absent or not readable."""
    value: Any = call.get(key)
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1):
        return value
    reading.lose(key, f"{unused_reason(value)}; read as its default {default}")
    return default
