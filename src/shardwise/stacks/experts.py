"""Experts in the files of other stacks: who divides, stores and balances them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.adapter import Adapter
from shardwise.spec.dispatch import ALL_TO_ALL, Dispatch
from shardwise.spec.lookup import Model, may_have_experts
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.train import BalanceLoss
from shardwise.stacks.outcomes import Difference, repr_text
from shardwise.stacks.read.imported import Reading, boolean, positive_integer, subtable
from shardwise.units.dispatch import dispatch_of

# How tokens travel to experts, in torchtitan's words; "standard" is its default.
_OF_TITAN: dict[str, Dispatch] = {
    "standard": ALL_TO_ALL,
    "deepep": "deepep",
    "hybridep": "hybridep",
}
_IN_CONFIG = "set output_router_logits of the model's configuration, which adds that of each rank"
# What becomes of the auxiliary loss of routers; Megatron-Bridge has a setting for it, the script of
# plain torch says so itself, and other stacks run Shardwise.
_BALANCE = {
    **dict.fromkeys(("trainer", "trl", "axolotl", "llama-factory"), _IN_CONFIG),
    **dict.fromkeys(("accelerate", "deepspeed"), "add it to the loss in your script"),
    "lightning": "the script adds no auxiliary loss for routers",
    "torchtitan": "torchtitan has none; it moves a bias of each expert (load_balance_coeff)",
}
# moe_router_load_balancing_type of Megatron for each auxiliary loss.
_MEGATRON_BALANCE = {"none": "none", "local": "aux_loss", "global": "global_aux_loss"}
# Families that DeepSpeed's AutoEP finds experts in.
_AUTO_EP = ("mixtral", "qwen3_moe")
# Stacks with adapters, and those of them that store stacked experts quantised. Others leave it to
# bitsandbytes, which replaces linear layers alone.
_ADAPT = ("accelerate", "trainer", "trl", "axolotl", "llama-factory", "deepspeed")
_QUANTISE = ("axolotl",)


def stored_by(stack: str, adapter: Adapter, model: Model) -> Adapter:
    """The adapter as a stack stores its base: with experts in 16 bits if it quantises none."""
    keeps = stack not in _ADAPT or stack in _QUANTISE or not may_have_experts(model)
    if keeps or not adapter.quantises_experts:
        return adapter
    return adapter.but(quantised_experts=False)


def with_base_of(stack: str, run: RunSpec) -> RunSpec:
    """The run with frozen weights as a stack stores them."""
    if run.adapter is None:
        return run
    adapter = stored_by(stack, run.adapter, run.model)
    return run._replace(model=run.model.but(adapter=adapter))


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


def set_dispatch(reading: Reading, key: str, backend: object) -> None:
    """Set how tokens travel from torchtitan's name of it, where experts are divided."""
    if backend is None or "expert" not in reading.strategy:
        return
    dispatch = _OF_TITAN.get(str(backend))
    if dispatch is None:
        reading.lose(key, f"{repr_text(backend)} is planned as torch's all-to-all")
    else:
        reading.given(key, {"dispatch": dispatch})


def titan_backend(run: RunSpec) -> str:
    """torchtitan's name of how the run's tokens travel to experts; empty for its default."""
    dispatch = dispatch_of(run.strategy, run.cluster)
    if run.strategy.expert == 1 or dispatch == ALL_TO_ALL:
        return ""
    return next(name for name, ours in _OF_TITAN.items() if ours == dispatch)


def megatron_dispatcher(run: RunSpec) -> dict[str, Any]:
    """Megatron's settings of how the run's tokens travel to experts."""
    dispatch = dispatch_of(run.strategy, run.cluster)
    if dispatch == ALL_TO_ALL:
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": dispatch,
        # The library computes with probabilities in fp32, and not beside shared experts.
        "moe_router_dtype": "fp32",
        "moe_shared_expert_overlap": False,
    }


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


def balance_differences(run: RunSpec, stack: str) -> tuple[Difference, ...]:
    """What a stack does instead of the auxiliary loss of routers; empty if it does the same."""
    kind, why = _balance_loss(run), _BALANCE.get(stack)
    if stack == "megatron-bridge" and kind == "global":
        why = "Megatron's shares of tokens are of all micro-batches of a step, not of each"
    balances_anyway = stack == "torchtitan" and _has_experts(run)
    if why is None or (kind == "none" and not balances_anyway):
        return ()
    return (Difference(why, {"train.balance_loss": kind}),)


def megatron_balance(run: RunSpec) -> dict[str, Any]:
    """Megatron's setting of the auxiliary loss, whose coefficient is the model's; empty without."""
    if not _has_experts(run):
        return {}
    return {"moe_router_load_balancing_type": _MEGATRON_BALANCE[_balance_loss(run)]}


def _balance_loss(run: RunSpec) -> BalanceLoss:
    return "none" if run.train is None else run.train.balance_loss


def _has_experts(run: RunSpec) -> bool:
    return isinstance(run.model, ModelSpec) and bool(run.model.experts)
