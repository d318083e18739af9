"""Restrict a search to what another stack can run."""

from __future__ import annotations

from shardwise.planning.space import STACK_LOSSES, Space
from shardwise.spec.adapter import Adapter
from shardwise.spec.run import RunSpec
from shardwise.spec.software import software_of_stack
from shardwise.spec.strategy import Strategy
from shardwise.stacks.experts import stored_by
from shardwise.stacks.limits import LEAVES_OUT, StackLimits, expresses


def with_software_of(stack: str, run: RunSpec) -> RunSpec:
    """The run with a stack's software on its cluster, unless the cluster already names one."""
    software = software_of_stack(stack)
    if run.cluster.software is not None or software is None:
        return run
    return run._replace(cluster=run.cluster.but(software=software))


def within_stack(run: RunSpec, stack: str, space: Space) -> tuple[Strategy, Space]:
    """The base strategy and the search space, restricted to what a stack can run."""
    limits = StackLimits(run, stack)
    base = limits.base(run.strategy)
    losses = space.losses if len(space.losses) == 1 else STACK_LOSSES
    return base, space._replace(
        recompute=limits.choices("recompute", space.recompute),
        prefetch=limits.choices("prefetch", space.prefetch),
        forward_prefetch=limits.choices("forward_prefetch", space.forward_prefetch),
        blocks_per_unit=limits.choices("blocks_per_unit", space.blocks_per_unit),
        losses=limits.choices("loss", losses),
        reduce_dtypes=limits.choices("reduce_dtype", space.reduce_dtypes),
        allowed=limits.allowed,
        applied=limits.applied,
        has_optimizer=limits.has_optimizer,
        trains=limits.trains,
        leaves_out=LEAVES_OUT.get(stack, ()),
        stored=lambda adapter: stored_by(stack, adapter, run.model),
        adapted=lambda adapter: _adapted_within_stack(run, stack, space, adapter),
    )


def _adapted_within_stack(
    run: RunSpec, stack: str, space: Space, adapter: Adapter
) -> tuple[Strategy, Space] | None:
    """`within_stack` for the run with an adapter; None if the stack cannot express adapters."""
    stored = stored_by(stack, adapter, run.model)
    adapted = run._replace(model=run.model.but(adapter=stored))
    return within_stack(adapted, stack, space) if expresses(adapted, stack, "adapter") else None
