"""Strategies that a stack can run, for a search that tries no others."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from shardwise.predict.fit import Parallelism
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.axes import as_run
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Setting
from shardwise.stacks.write.exports import applied_strategy, export_run, unknown_optimizer
from shardwise.stacks.write.optimizers import optimizers_of, trains

Value = TypeVar("Value")

# Parallelism that stacks are made of and that no strategy of Shardwise expresses.
LEAVES_OUT: dict[str, tuple[Parallelism, ...]] = {
    "megatron-bridge": ("pipeline", "expert"),
    "torchtitan": ("pipeline", "expert"),
    "deepspeed": ("pipeline", "expert"),
}


def expresses(run: RunSpec, stack: str, setting: Setting) -> bool:
    """Whether a stack trains the run without changing a setting."""
    try:
        return setting not in export_run(_trained(run, stack), stack).changed
    except SpecError:
        return False


def _trained(run: RunSpec, stack: str) -> RunSpec:
    """The run, replicated where its optimizer does not run with its strategy."""
    if trains(stack, run.job.optimizer, run.strategy):
        return run
    cluster, dtype = run.cluster, run.strategy.param_dtype
    replicated = Strategy(kind="single" if cluster.devices == 1 else "ddp", param_dtype=dtype)
    return run._replace(strategy=replicated.resolve(cluster.devices, cluster.devices_per_node))


class StackLimits:
    """What one stack can run of a model on a cluster."""

    def __init__(self, run: RunSpec, stack: str) -> None:
        """Raises SpecError where the stack cannot train the model, or not with its optimizer."""
        exported = export_run(_trained(run, stack), stack)
        if "job.optimizer" in exported.changed:
            raise SpecError(unknown_optimizer(run, stack))
        self.stack = stack
        self._run = run
        self.applied = cache(self._applied)
        kind = "single" if run.cluster.devices == 1 else "zero3"
        start = Strategy(kind=kind, param_dtype=run.strategy.param_dtype)
        size = run.cluster.devices, run.cluster.devices_per_node
        self._typical = self.applied(start.resolve(*size))

    def _applied(self, strategy: Strategy) -> Strategy:
        """The strategy as the stack runs it, on as many devices as its degrees multiply to."""
        cluster = self._run.cluster
        if strategy.devices != cluster.devices:
            per_node = min(cluster.devices_per_node, strategy.devices)
            cluster = cluster.but(nodes=strategy.devices // per_node, devices_per_node=per_node)
        run = self._run._replace(strategy=strategy, cluster=cluster)
        return applied_strategy(run, self.stack)

    def allowed(self, strategy: Strategy) -> bool:
        """Whether the stack runs this strategy unchanged."""
        try:
            return not changed_fields(strategy, self.applied(strategy))
        except SpecError:
            # It has no tensor or context parallelism, or not for these degrees.
            return False

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Whether the stack trains with this optimizer."""
        return optimizer in optimizers_of(self.stack)

    def trains(self, optimizer: Optimizer, strategy: Strategy) -> bool:
        """Whether the stack runs an optimizer that it has with this strategy."""
        return trains(self.stack, optimizer, strategy)

    def choices(self, field: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Those of the values of a field that the stack runs unchanged in a typical strategy."""
        return tuple(value for value in values if self._allows(field, value))

    def _allows(self, field: str, value: object) -> bool:
        try:
            return self.allowed(self._typical.but(**{field: value}))
        except SpecError:
            # It contradicts what the stack does, such as the loss of TRL a divided vocabulary.
            return False

    def base(self, strategy: Strategy) -> Strategy:
        """The strategy with the dtypes, the loss and the methods that the stack uses for it."""
        applied = self.applied(strategy)
        names = ("param_dtype", "reduce_dtype", "master_dtype", "compile", "loss")
        strategy = strategy.but(**{name: getattr(applied, name) for name in names})
        # A search may divide matrices or sequences where the strategy it starts from does not.
        return as_run(strategy, self.stack)
