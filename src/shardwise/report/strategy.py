"""A strategy in words: a whole line, what to set, or a cell of a table."""

from __future__ import annotations

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy, show_recompute
from shardwise.step import StepProfile

_SYNC = {
    "every": "every micro-batch",
    "local": "in groups at once, across them last",
    "last": "last",
}


def how(run: RunSpec) -> str:
    """Everything about a run that is not its model or its cluster, in a line."""
    strategy, job = run.strategy, run.job
    own, master = strategy.param_dtype, strategy.master_dtype
    batch = f"{strategy.micro_batch} x {job.seq_len:,} tokens per device"
    parts = [
        str(strategy),
        batch if strategy.accumulate == 1 else f"{batch}, {strategy.accumulate} times a step",
        f"recompute {show_recompute(strategy.recompute)}",
        own if own == master else f"{own} over {master}",
        job.optimizer,
        _blocks(strategy),
        _prefetch(strategy),
        _reshard(strategy),
        f"gradients reduced {_SYNC[strategy.grad_sync or 'every']}"
        if strategy.accumulate > 1
        else "",
        "compiled" if strategy.compile else "",
        "offloaded" if strategy.offload else "",
    ]
    return " · ".join(part for part in parts if part)


def settings(strategy: Strategy, seq_len: int | None = None) -> str:
    """What to set, in words."""
    size = f"{strategy.micro_batch} x {seq_len:,} tokens" if seq_len else ""
    times = f", {strategy.accumulate} times a step" if strategy.accumulate > 1 else ""
    recompute = "no recomputation" if strategy.recompute == "none" else ""
    parts = [
        str(strategy),
        f"{size}{times} per device" if size else "",
        recompute or f"recompute {show_recompute(strategy.recompute)}",
        _reshard(strategy),
        _prefetch(strategy),
        f"forward prefetch {strategy.forward_prefetch}" if strategy.forward_prefetch else "",
        _blocks(strategy),
        f"gradients reduced {strategy.grad_sync}"
        if strategy.accumulate > 1 and strategy.sharded and strategy.grad_sync != "every"
        else "",
        f"reduce in {strategy.reduce_dtype}" if strategy.reduce_dtype != "fp32" else "",
        "offloaded" if strategy.offload else "",
    ]
    return ", ".join(part for part in parts if part)


def _blocks(strategy: Strategy) -> str:
    return f"{strategy.blocks_per_unit} blocks per unit" if strategy.blocks_per_unit > 1 else ""


def _prefetch(strategy: Strategy) -> str:
    told = strategy.prefetch != 1 and strategy.sharded
    return f"prefetch {strategy.prefetch}" if told else ""


def _reshard(strategy: Strategy) -> str:
    group = strategy.reshard_after_forward
    return f"reshard in {group}s" if type(group) is int else ""


def layout_words(strategy: Strategy) -> str:
    """What is sharded, and for a hybrid over how many."""
    return f"{strategy.kind} x {strategy.shard}" if strategy.hybrid else str(strategy)


def batch_words(strategy: Strategy) -> str:
    """Sequences per device at a time, and how many times a step."""
    times = f" x {strategy.accumulate}" if strategy.accumulate > 1 else ""
    return f"{strategy.micro_batch}{times}"


def strategy_words(profile: StepProfile) -> str:
    """The strategy of a profile in a word or two."""
    strategy = profile.strategy
    shard, replicate = strategy.get("shard") or 1, strategy.get("replicate") or 1
    groups = f" in groups of {shard}" if shard > 1 and replicate > 1 else ""
    return f"{strategy.get('kind', '?')}{groups}"
