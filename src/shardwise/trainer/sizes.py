"""The numbers of hosts on which an elastic run can train, and the prediction for each."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.launch.environment import HostRange
from shardwise.predict.api import estimate_run
from shardwise.spec.quantity import show_count, show_gib, show_seconds
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.step.profile import StepProfile
from shardwise.trainer.admit import check_batch, check_can_train


class Size(NamedTuple):
    """A number of hosts: the prediction for it, or the problem why the run cannot use it."""

    hosts: int
    accumulate: int = 0
    predicted: StepProfile | None = None
    problem: str = ""

    @property
    def memory_bytes(self) -> int | None:
        """Predicted memory of one device in bytes: needed, or else the peak of tensors."""
        memory = self.predicted.memory if self.predicted is not None else None
        return None if memory is None else memory.needed_bytes or memory.peak_allocated_bytes

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step; None without a prediction."""
        time = self.predicted.time if self.predicted is not None else None
        return None if time is None else time.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted tokens per second of all devices; None without a prediction."""
        rate = self.predicted.throughput if self.predicted is not None else None
        return None if rate is None else rate.tokens_per_s

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'s' if self.hosts != 1 else ''}"
        if self.problem or self.predicted is None:
            return f"{hosts}: not used: {self.problem}"
        words = [f"{hosts}: {self.accumulate} micro-batches per rank and step"]
        if self.memory_bytes is not None:
            words.append(f"{show_gib(self.memory_bytes)} per rank")
        if self.step_s is not None:
            words.append(f"{show_seconds(self.step_s)} per step")
        if self.tokens_per_s is not None:
            words.append(f"{show_count(self.tokens_per_s)} tokens/s")
        return ", ".join(words)


def sizes_of(run: RunSpec, per_host: int, hosts: HostRange) -> list[Size]:
    """Every number of hosts of the range, largest first, with its prediction or its problem.

    A number with a problem cannot be used. Raises SpecError if all have one, or if hosts may vary
    without a global batch.
    """
    _check_global_batch(run, per_host, hosts)
    sizes = [_size(run, per_host, n) for n in range(hosts.most, hosts.least - 1, -1)]
    if all(size.problem for size in sizes):
        raise SpecError(f"--nnodes: the run can use none of these sizes; {sizes[0]}")
    return sizes


def _check_global_batch(run: RunSpec, per_host: int, hosts: HostRange) -> None:
    """Raise SpecError if the number of hosts may vary but no global batch is set."""
    if hosts.is_elastic and run.job.global_batch is None:
        strategy = run.strategy.resolve(hosts.most * per_host, per_host)
        tokens = run.job.tokens_per_step(strategy)
        raise SpecError(
            "job.global_batch: must be set if the number of hosts varies, so that each step trains "
            f"the same samples on any number; it is {tokens:,} on {hosts.most} hosts"
        )


def _size(run: RunSpec, per_host: int, hosts: int) -> Size:
    """The Size of this number of hosts, with its prediction or its problem."""
    try:
        check_can_train(run, hosts * per_host, per_host)
        cluster = run.cluster.but(nodes=hosts, devices_per_node=per_host)
        resolved = run._replace(cluster=cluster).resolved()
        check_batch(resolved)
        predicted = estimate_run(resolved)
    except SpecError as error:
        return Size(hosts, problem=error.problems[0])
    memory = predicted.memory
    if memory is not None and memory.fits is False:
        needed, usable = memory.needed_bytes or 0, memory.usable_bytes or 0
        problem = f"does not fit: needs {show_gib(needed)}, {show_gib(usable)} usable"
        return Size(hosts, problem=problem)
    return Size(hosts, resolved.strategy.accumulate, predicted)
