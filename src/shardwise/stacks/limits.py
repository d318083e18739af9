"""Limit a search to the strategies that one stack can run."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from shardwise.predict.fit import Parallelism
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.axes import as_stack_runs
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Setting
from shardwise.stacks.write.exports import applied_strategy, export_run, unknown_optimizer
from shardwise.stacks.write.optimizers import optimizers_of, trains

Value = TypeVar("Value")

# Parallelism that a stack offers and that no search of Shardwise tries.
LEAVES_OUT: dict[str, tuple[Parallelism, ...]] = {
    "megatron-bridge": ("pipeline",),
    "torchtitan": ("pipeline",),
    "deepspeed": ("pipeline",),
}


def expresses(run: RunSpec, stack: str, setting: Setting) -> bool:
    """Whether `stack` trains `run` without changing `setting`; False if it cannot train the run."""
    try:
        return setting not in export_run(_as_trained(run, stack), stack).changed
    except SpecError:
        return False


def _as_trained(run: RunSpec, stack: str) -> RunSpec:
    """The run, with DDP (or one device) if the stack lacks its optimizer for its strategy."""
    if trains(stack, run.job.optimizer, run.strategy):
        return run
    cluster, dtype = run.cluster, run.strategy.param_dtype
    kind = "single" if cluster.devices == 1 else "ddp"
    replicated = Strategy(kind=kind, param_dtype=dtype, micro_batch=run.job.example)
    return run._replace(strategy=replicated.resolve(cluster.devices, cluster.devices_per_node))


class StackLimits:
    """Which strategies and optimizers one stack can run for one model on one cluster."""

    def __init__(self, run: RunSpec, stack: str) -> None:
        """Prepare the checks for the model, cluster and optimizer of `run`.

        Raises:
            SpecError: The stack cannot train the model, or lacks the optimizer.
        """
        self._run = run
        run = run._replace(strategy=self._of_examples(run.strategy))
        exported = export_run(_as_trained(run, stack), stack)
        if "job.optimizer" in exported.changed:
            raise SpecError(unknown_optimizer(run, stack))
        self.stack = stack
        self.applied = cache(self._applied)
        kind = "single" if run.cluster.devices == 1 else "zero3"
        dtype, example = run.strategy.param_dtype, run.job.example
        start = Strategy(kind=kind, param_dtype=dtype, micro_batch=example)
        size = run.cluster.devices, run.cluster.devices_per_node
        self._typical = self.applied(start.resolve(*size))

    def _applied(self, strategy: Strategy) -> Strategy:
        """The strategy as the stack would run it, with the stack's own settings filled in.

        If its degrees need another number of devices than the run's cluster has, the cluster is
        resized.
        """
        cluster, strategy = self._run.cluster, self._of_examples(strategy)
        if strategy.devices != cluster.devices:
            per_node = min(cluster.devices_per_node, strategy.devices)
            cluster = cluster.but(nodes=strategy.devices // per_node, devices_per_node=per_node)
        run = self._run._replace(strategy=strategy, cluster=cluster)
        return applied_strategy(run, self.stack)

    def allowed(self, strategy: Strategy) -> bool:
        """Whether the stack runs this strategy unchanged."""
        strategy = self._of_examples(strategy)
        try:
            return not changed_fields(strategy, self.applied(strategy))
        except SpecError:
            # The stack has no tensor or context parallelism, or not with these degrees.
            return False

    def _of_examples(self, strategy: Strategy) -> Strategy:
        """The strategy with a micro-batch of whole examples, which files of stacks count."""
        example = self._run.job.example
        left = strategy.micro_batch % example
        return strategy.but(micro_batch=strategy.micro_batch + example - left) if left else strategy

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Whether the stack has this optimizer with at least one strategy."""
        return optimizer in optimizers_of(self.stack)

    def trains(self, optimizer: Optimizer, strategy: Strategy) -> bool:
        """Whether the stack runs this optimizer together with this strategy."""
        return trains(self.stack, optimizer, strategy)

    def choices(self, field: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """The subset of `values` that the stack runs unchanged as `field` of a typical strategy.

        The typical strategy is ZeRO-3 on the run's cluster, or one device.
        """
        return tuple(value for value in values if self._allows(field, value))

    def _allows(self, field: str, value: object) -> bool:
        """Whether the stack runs this value of a field unchanged in the typical strategy."""
        try:
            return self.allowed(self._typical.but(**{field: value}))
        except SpecError:
            # The value contradicts a setting of the stack, as tensor parallelism does TRL's loss.
            return False

    def base(self, strategy: Strategy) -> Strategy:
        """The strategy with the dtypes, compile and loss that the stack uses for it.

        Settings that apply only to tensor or context parallelism are set too.
        """
        applied = self.applied(strategy)
        names = ("param_dtype", "reduce_dtype", "master_dtype", "states", "compile", "loss")
        strategy = strategy.but(**{name: getattr(applied, name) for name in names})
        # A search may add tensor or context parallelism to the strategy that it starts from.
        return as_stack_runs(strategy, self.stack)
