"""Which stacks run tensor and context parallelism, and with which other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import ContextMethod, Strategy


class Axes(NamedTuple):
    """The axes of a stack beside those of data parallelism."""

    # Whether what lies between matrices can be divided along the sequence, or whole; what the
    # stack prefers first. Nothing where it has no tensor parallelism.
    tensor: tuple[bool, ...] = ()
    # How it divides sequences, the method that it prefers first; nothing where it does not.
    context: tuple[ContextMethod, ...] = ()
    # Why it cannot run these degrees, as the rest of a sentence; nothing where it can.
    refuses: Callable[[RunSpec], str | None] | None = None


def check_axes(run: RunSpec, stack: str) -> None:
    """Raise SpecError where a stack cannot run the tensor or context degree of a run.

    Leaving such an axis out would change how many sequences a step has, so it is not a difference
    that a list could announce.
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
    why = _uneven(run) or (axes.refuses(run) if axes.refuses is not None else None)
    if why:
        raise SpecError(f"strategy: {stack} cannot run {here}: {why}")


def as_run(strategy: Strategy, stack: str) -> Strategy:
    """The strategy with the methods of tensor and context parallelism that a stack has."""
    axes = AXES.get(stack, Axes((True, False), ("ulysses", "ring")))
    if axes.tensor and strategy.sequence_parallel not in axes.tensor:
        strategy = strategy.but(sequence_parallel=axes.tensor[0])
    if axes.context and strategy.context_method not in axes.context:
        strategy = strategy.but(context_method=axes.context[0])
    return strategy


def _uneven(run: RunSpec) -> str | None:
    """What cannot be divided evenly, which no stack does."""
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
    strategy = run.strategy
    inner = {"tensor": strategy.tensor, "context": strategy.context}
    return " with ".join(f"{axis} {degree}" for axis, degree in inner.items() if degree > 1)


def _others(axis: str) -> str:
    names = [name for name, axes in AXES.items() if getattr(axes, axis)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _through_accelerate(run: RunSpec) -> str | None:
    """What accelerate's ParallelismConfig refuses, and launches of it on CPUs."""
    strategy = run.strategy
    if run.cluster.device.is_cpu:
        return "accelerate shards on GPUs only; on CPUs it runs DDP"
    if not strategy.sharded:
        return "its ParallelismConfig combines it with sharding only; choose zero2 or zero3"
    if strategy.mesh.shard == 1 and (strategy.mesh.replicate > 1 or strategy.context == 1):
        return "its ParallelismConfig needs a shard degree of at least 2"
    return None


def _fine_tuning(run: RunSpec) -> str | None:
    """Of stacks that run ZeRO-1 through DeepSpeed and everything else through accelerate."""
    strategy = run.strategy
    if strategy.kind == "zero1" and strategy.context > 1:
        return "ZeRO-1 is DeepSpeed's there, which divides no sequences; choose zero2 or zero3"
    if strategy.kind == "zero1" and strategy.sharded and not run.cluster.device.is_cpu:
        return None
    return _through_accelerate(run)


def _by_deepspeed(run: RunSpec) -> str | None:
    strategy = run.strategy
    if strategy.tensor > 1 and strategy.context > 1:
        return "DeepSpeed combines AutoTP with no division of sequences"
    if strategy.tensor > 1 and strategy.kind == "zero3" and strategy.reshard_after_forward:
        return "its AutoTP works with ZeRO stages 0 to 2; choose ddp, zero1 or zero2"
    if strategy.hybrid:
        return "DeepSpeed shards over all devices, in no groups"
    return None


def _by_script(run: RunSpec) -> str | None:
    from shardwise.stacks.write.python.divisible import why_not_divided

    return why_not_divided(run)


# Stacks that are not listed start `shardwise train`, which runs what a run.toml says.
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
