"""Which stacks support tensor and context parallelism, and with which methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import ContextMethod, Strategy


class Axes(NamedTuple):
    """The tensor and context parallelism of a stack."""

    # The supported values of sequence_parallel, the preferred one first; empty without tensor
    # parallelism.
    tensor: tuple[bool, ...] = ()
    # The supported context methods, the preferred one first; empty without context parallelism.
    context: tuple[ContextMethod, ...] = ()
    # From a run to the reason why the stack cannot run its degrees; None if it can.
    refuses: Callable[[RunSpec], str | None] | None = None


def check_axes(run: RunSpec, stack: str) -> None:
    """Raise SpecError if a stack cannot run the tensor or context degree of a run.

    Without such an axis a step would have another number of sequences, so it is an error and not
    one of the differences.
    """
    strategy, axes = run.strategy, AXES.get(stack)
    if axes is None or strategy.mesh.inner == 1:
        return
    here = _degrees(run)
    if strategy.tensor > 1 and not axes.tensor:
        others = _others("tensor")
        raise SpecError(f"strategy.tensor: {stack} has no tensor parallelism; export to {others}")
    if strategy.context > 1 and not axes.context:
        others = _others("context")
        raise SpecError(f"strategy.context: {stack} has no context parallelism; export to {others}")
    why = _uneven_reason(run) or (axes.refuses(run) if axes.refuses is not None else None)
    if why:
        raise SpecError(f"strategy: {stack} cannot run {here}: {why}")


def as_stack_runs(strategy: Strategy, stack: str) -> Strategy:
    """The strategy with `sequence_parallel` and `context_method` that the stack supports."""
    axes = AXES.get(stack, Axes((True, False), ("ulysses", "ring")))
    if axes.tensor and strategy.sequence_parallel not in axes.tensor:
        strategy = strategy.but(sequence_parallel=axes.tensor[0])
    if axes.context and strategy.context_method not in axes.context:
        strategy = strategy.but(context_method=axes.context[0])
    return strategy


def _uneven_reason(run: RunSpec) -> str | None:
    """A reason if heads or the sequence cannot be divided evenly; or None."""
    strategy, model, length = run.strategy, run.model, run.job.seq_len
    if isinstance(model, ModelSpec):
        for count, name in ((model.heads, "heads"), (model.kv_heads, "key and value heads")):
            if count % strategy.tensor:
                return f"the {count} {name} of the model are not a multiple of {strategy.tensor}"
    pieces = strategy.context * (strategy.tensor if strategy.sequence_parallel else 1)
    if length % pieces:
        return f"a sequence length of {length:,} is not a multiple of {pieces}"
    return None


def _degrees(run: RunSpec) -> str:
    """The degrees as text, such as "tensor 2 with context 4"."""
    strategy = run.strategy
    inner = {"tensor": strategy.tensor, "context": strategy.context}
    return " with ".join(f"{axis} {degree}" for axis, degree in inner.items() if degree > 1)


def _others(axis: str) -> str:
    """The stacks that support an axis, as text."""
    names = [name for name, axes in AXES.items() if getattr(axes, axis)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _through_accelerate(run: RunSpec) -> str | None:
    """A reason why accelerate's ParallelismConfig cannot run the degrees; or None."""
    strategy = run.strategy
    if run.cluster.device.is_cpu:
        return "accelerate shards on GPUs only; on CPUs it runs DDP"
    if not strategy.sharded:
        return "its ParallelismConfig combines it with sharding only; choose zero2 or zero3"
    if strategy.mesh.shard == 1 and (strategy.mesh.replicate > 1 or strategy.context == 1):
        return "its ParallelismConfig needs a shard degree of at least 2"
    return None


def _fine_tuning(run: RunSpec) -> str | None:
    """A reason why a stack with ZeRO-1 by DeepSpeed, else accelerate, cannot; or None."""
    strategy = run.strategy
    if strategy.kind == "zero1" and strategy.context > 1:
        return "ZeRO-1 is DeepSpeed's there, which divides no sequences; choose zero2 or zero3"
    if strategy.kind == "zero1" and strategy.sharded and not run.cluster.device.is_cpu:
        return None
    return _through_accelerate(run)


def _by_deepspeed(run: RunSpec) -> str | None:
    """A reason why DeepSpeed cannot run the degrees; or None."""
    strategy = run.strategy
    if strategy.tensor > 1 and strategy.context > 1:
        return "DeepSpeed combines AutoTP with no division of sequences"
    if strategy.tensor > 1 and strategy.kind == "zero3" and strategy.reshard_after_forward:
        return "its AutoTP works with ZeRO stages 0 to 2; choose ddp, zero1 or zero2"
    if strategy.hybrid:
        return "DeepSpeed shards over all devices, in no groups"
    return None


def _by_script(run: RunSpec) -> str | None:
    """A reason why an exported script cannot run the degrees; or None."""
    from shardwise.stacks.write.python.divisible import why_not_divided

    return why_not_divided(run)


# Stacks that are not listed run `shardwise train`, which supports every run.toml.
AXES: dict[str, Axes] = {
    "accelerate": Axes((False,), ("ring",), _through_accelerate),
    "trainer": Axes((False,), ("ring",), _through_accelerate),
    "deepspeed": Axes((False,), ("ulysses",), _by_deepspeed),
    "torchtitan": Axes((True,), ("ring",)),
    "megatron-bridge": Axes((True, False), ("ring", "ulysses")),
    "python": Axes((True, False), ("ulysses",), _by_script),
    "axolotl": Axes((False,), ("ring",), _fine_tuning),
    "trl": Axes((), ("ring",), _fine_tuning),
    "lightning": Axes(),
    "llama-factory": Axes(),
}
