"""Read how a script shards with `fully_shard` or DDP, and the dtypes that it computes in."""

from __future__ import annotations

from shardwise.stacks.read.imported import Reading, list_unknown
from shardwise.stacks.read.source import (
    DIFFERS,
    Call,
    Script,
    Unknown,
    script_value_text,
    unused_reason,
)
from shardwise.stacks.read.torch_axes import read_axes
from shardwise.stacks.read.torch_values import DTYPES, is_number, read_mesh, read_mixed_precision

WITH_DDP = "a script with DDP"
# Known arguments of fully_shard and DDP: those that are read, and those that no plan depends on.
_FULLY_SHARD = ("module", "mesh", "reshard_after_forward", "mp_policy", "offload_policy",
                "shard_placement_fn", "ignored_params", "dp_mesh_dims")  # fmt: skip
_DDP = ("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync",
        "process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction",
        "gradient_as_bucket_view", "static_graph", "delay_all_reduce_named_params",
        "param_to_hook_all_reduce", "mixed_precision", "device_mesh",
        "skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy",
        "forward_sync_buffers")  # fmt: skip


def read_fully_shard(script: Script, calls: list[Call], reading: Reading) -> None:
    """Read the calls of `fully_shard`: kind, dtypes, mesh, tensor and context degrees, offload."""
    # The root is sharded last, and often keeps its parameters whatever the blocks do.
    blocks = calls[:-1] or calls
    values = {script_value_text(call.get("reshard_after_forward")) for call in blocks}
    value = blocks[0].get("reshard_after_forward")
    if len(values) > 1:
        value = DIFFERS
    if any(call.more for call in calls):
        reading.warn(
            "Some settings of fully_shard come from a dictionary made when the script runs."
        )
        value = Unknown("what that dictionary holds") if value is None else value
    _set_kind(value, reading)
    if len(calls) == 1:
        reading.remark(
            "The script calls fully_shard once: in a loop over blocks, or on the root alone."
        )
    first = calls[0]
    _others_of_fully_shard(calls, reading)
    policy = first.get("mp_policy")
    if policy is None and first.more:
        policy = Unknown("what that dictionary holds")
    read_mixed_precision(policy, reading)
    if not read_axes(script, reading):
        read_mesh(first.get("mesh"), reading)
    offload = first.get("offload_policy")
    if isinstance(offload, Call) and offload.name in ("CPUOffloadPolicy", "OffloadPolicy"):
        reading.given(offload.name, {"offload": offload.name == "CPUOffloadPolicy"})
    elif offload is not None:
        reading.lose("offload_policy", unused_reason(offload))
    if script.uses("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        reading.warn(
            "The script chooses what to prefetch; set strategy.prefetch, which counts units."
        )


def _set_kind(value: object, reading: Reading) -> None:
    """Set the kind, ZeRO-2 or ZeRO-3, from the value of `reshard_after_forward`."""
    key = "reshard_after_forward"
    kind = {"kind": "zero2" if value is False else "zero3"}
    if value is None:
        reading.default(key, kind, True)
    elif isinstance(value, (bool, int)):
        reading.given(key, kind, value, naming="pair")
        if not isinstance(value, bool):
            reading.strategy[key] = value
    else:
        reading.strategy |= kind
        reading.lose(key, f"{unused_reason(value)}; read as true")


def _others_of_fully_shard(calls: list[Call], reading: Reading) -> None:
    """Report the other arguments of `fully_shard` that have no counterpart."""
    for call in calls:
        list_unknown(reading, call.keywords, _FULLY_SHARD, "fully_shard.")
        for name, why in (
            ("ignored_params", "Shardwise shards every parameter"),
            ("shard_placement_fn", "Shardwise shards parameters along their first dimension"),
        ):
            if call.get(name) is not None:
                reading.lose(name, why)


def read_ddp(calls: list[Call], reading: Reading) -> None:
    """Read the first call of DistributedDataParallel, and list unknown arguments of all calls."""
    reading.given("DistributedDataParallel", {"kind": "ddp"})
    for call in calls:
        list_unknown(reading, call.keywords, _DDP, "DistributedDataParallel.")
    for name in ("mixed_precision", "process_group", "device_mesh", "bucket_cap_mb_list"):
        if calls[0].get(name) is not None:
            reading.lose(name, "Shardwise has no counterpart")
    if calls[0].more:
        reading.warn("Some settings of DDP come from a dictionary made when the script runs.")
    bucket = calls[0].get("bucket_cap_mb")
    if bucket is not None and not is_number(bucket):
        reading.lose("bucket_cap_mb", unused_reason(bucket))
    elif bucket is not None:
        reading.given("bucket_cap_mb", {"ddp_bucket_mib": bucket})
    if calls[0].get("gradient_as_bucket_view") is not True:
        reading.remark(
            "The script's DDP keeps gradients beside buckets; Shardwise keeps them in the buckets."
        )
    if calls[0].get("find_unused_parameters") is True:
        reading.lose(
            "find_unused_parameters", "every parameter must receive a gradient in Shardwise"
        )
    if calls[0].get("static_graph") is True:
        reading.lose("static_graph", "Shardwise does not set it")


def read_precision(script: Script, reading: Reading) -> None:
    """Read autocast, and the dtype that the model is loaded in."""
    sharded = reading.strategy.get("kind") != "ddp"
    if reading.what != WITH_DDP and "param_dtype" not in reading.strategy:
        # The script passes a mixed-precision policy that is known only at run time.
        return
    low, known = _autocast(script, reading)
    if not known:
        return
    if low and reading.strategy.get("param_dtype", "fp32") == "fp32":
        reading.strategy |= {"param_dtype": low, "reduce_dtype": "fp32"}
        if sharded:
            reading.lose(
                "autocast",
                f"the script gathers parameters in fp32 and computes in {low}; Shardwise gathers "
                f"them in {low}, half the bytes",
            )
        else:
            reading.given("autocast", {"param_dtype": low})
    elif not sharded:
        reading.strategy.setdefault("param_dtype", "fp32")
    for call in script.calls("from_pretrained", "from_config"):
        kept = DTYPES.get(script_value_text(call.get("dtype") or call.get("torch_dtype")))
        if kept in ("bf16", "fp16"):
            reading.strategy["master_dtype"] = kept
            if reading.strategy.get("param_dtype", "fp32") == "fp32" and not low:
                reading.strategy |= {"param_dtype": kept, "reduce_dtype": kept}
            loaded = f"The model is loaded in {kept}: master_dtype = {kept}."
            reading.remark(loaded, {"master_dtype": kept})
            break


def _autocast(script: Script, reading: Reading) -> tuple[str | None, bool]:
    """The dtype of the first enabled autocast, or None; and whether that answer is certain.

    It is uncertain if `enabled` or the dtype is known only at run time, which is reported.
    """
    for call in script.calls("autocast"):
        given, enabled = call.get("dtype", 1), call.get("enabled")
        if enabled is False:
            continue
        if enabled not in (None, True):
            reading.lose("autocast(enabled)", f"{unused_reason(enabled)}; set param_dtype")
            return None, False
        if given is None:
            device = call.get("device_type", 0)
            low = "bf16" if device == "cpu" else "fp16"
            where = "CPUs" if device == "cpu" else "GPUs"
            absent = f"autocast's dtype is absent, so its default on {where} holds, {low}."
            reading.remark(absent)
            return low, True
        if script_value_text(given) not in DTYPES:
            reading.lose("autocast", f"{unused_reason(given)}; set param_dtype")
            return None, False
        return DTYPES[script_value_text(given)], True
    return None, True
