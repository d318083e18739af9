"""Expert parallelism in the files of other stacks: who divides experts, and where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.read.imported import Reading, boolean, positive_integer, subtable

# Families that DeepSpeed's AutoEP finds experts in.
_AUTO_EP = ("mixtral", "qwen3_moe")


def set_experts(reading: Reading, key: str, degree: int) -> None:
    """Set `expert` from a key, or report it as lost beside what Shardwise does not combine it with.

    The rest of the strategy must have been read.
    """
    strategy = reading.strategy
    if degree == 1:
        return
    gathers = strategy.get("reshard_after_forward")
    if strategy.get("kind") in ("single", "ddp"):
        reading.lose(key, "Shardwise divides experts only where model states are sharded")
    elif strategy.get("tensor", 1) != 1:
        reading.lose(key, "Shardwise does not run it with tensor parallelism")
    elif strategy.get("offload"):
        reading.lose(key, "Shardwise does not run it with offload")
    elif isinstance(gathers, int) and not isinstance(gathers, bool):
        reading.lose(key, "Shardwise does not run it with groups that the backward gathers from")
    else:
        reading.given(key, {"expert": degree})


def read_auto_ep(table: Mapping[str, object], reading: Reading) -> None:
    """Read DeepSpeed's `expert_parallel`."""
    settings = subtable(table, "expert_parallel")
    if boolean(settings, "enabled", otherwise=False, where="expert_parallel."):
        degree = positive_integer(settings, "autoep_size", "expert_parallel.") or 1
        set_experts(reading, "expert_parallel.autoep_size", degree)


def write_auto_ep(run: RunSpec) -> dict[str, Any]:
    """DeepSpeed's `expert_parallel`; empty for models and layouts that AutoEP does not run."""
    strategy, model = run.strategy, run.model
    if strategy.expert == 1 or not isinstance(model, ModelSpec) or model.family not in _AUTO_EP:
        return {}
    if strategy.kind == "zero3" and (strategy.context > 1 or strategy.hybrid):
        return {}
    return {"expert_parallel": {"enabled": True, "autoep_size": strategy.expert}}
