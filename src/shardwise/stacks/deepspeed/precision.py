"""Keys about dtypes, which mean something only together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import plain_text
from shardwise.stacks.read.imported import Reading, boolean, subtable
from shardwise.stacks.table import Code

# The reason given for a value "auto", which sets nothing.
AUTO = "auto is decided when the script runs"
_AUTOCAST = {low: TORCH_NAMES[low] for low in ("bf16", "fp16")}


def _read(table: Mapping[str, object], reading: Reading) -> None:
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
        names = {long: short for short, long in _AUTOCAST.items()}
        given = plain_text(autocast.get("dtype", "bfloat16")).rpartition(".")[2]
        low = names.get(given, given)
        if low not in _AUTOCAST:
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


def _write(run: RunSpec) -> dict[str, Any]:
    """The keys about dtypes; empty for fp32 and for what DeepSpeed does not have."""
    strategy = run.strategy
    low = strategy.param_dtype
    if low == strategy.master_dtype == "bf16" and strategy.sharded:
        kept = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        reduce = strategy.reduce_dtype
        return {"bf16": {"enabled": True, **kept}, "communication_data_type": reduce}
    if low not in _AUTOCAST or strategy.master_dtype != "fp32":
        return {}
    if not strategy.sharded:
        # Parameters stay in fp32, as Shardwise keeps them under DDP.
        return {"torch_autocast": {"enabled": True, "dtype": _AUTOCAST[low]}}
    return {
        low: {"enabled": True},
        "communication_data_type": strategy.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32"},
    }


PRECISION = Code(
    (*(f"{name}.{key}" for name in ("bf16", "bfloat16") for key in
       ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")),
     "fp16.enabled", "fp16.fp16_master_weights_and_grads", "torch_autocast.enabled",
     "torch_autocast.dtype", "communication_data_type", "data_types", "amp"),
    "low precisions exclude each other, and reductions follow the one that is enabled",
    _read,
    _write,
)  # fmt: skip
