"""Explain traces and memory snapshots, from Python."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.analysis import Trace, read_traces
from shardwise.observe.memory.analysis import MemoryAnalysis, read_memories
from shardwise.observe.memory.verdict import HEADROOM
from shardwise.observe.rules import Rules, read_rules
from shardwise.observe.run_folder import trace_files
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster
from shardwise.spec.quantity import QuantityError, parse_bytes
from shardwise.spec.record import SpecError


def trace(
    *paths: str | Path,
    cluster: str | ClusterSpec | None = None,
    rules: str | Path | Rules | None = None,
    cache: str | Path | None = None,
) -> Trace:
    """Analyse profiler traces: the main cause of lost time, evidence, suggested fix.

    Args:
        paths: Traces of torch.profiler, one per rank; or a folder of traces; or a run folder.
            Give the traces of all ranks: only then can waiting be separated from transfer.
        cluster: The cluster of the run ("4x8xH100-SXM@400Gbps"), to compare with its peaks.
        rules: Kernel name patterns and thresholds, or a TOML file of them.
        cache: Folder to keep parsed traces in.

    Raises:
        SpecError: The files cannot be read; it lists every problem.

    Examples:
        >>> found = shardwise.trace("runs/mine")
        >>> found.verdicts[0].cause, found.health.compute
    """
    return read_traces(
        trace_files(Path(path) for path in paths),
        rules if isinstance(rules, Rules) else read_rules(Path(rules)) if rules else None,
        find_cluster(cluster) if isinstance(cluster, str) else cluster,
        cache=Path(cache) if cache else None,
    )


def memory(
    *paths: str | Path,
    device: int | None = None,
    capacity: str | int | None = None,
    headroom: float = HEADROOM,
) -> MemoryAnalysis:
    """Analyse memory snapshots: peak, owners, leaks, fragmentation.

    Args:
        paths: Snapshots of torch.cuda.memory, raw timelines of torch.profiler, or run folders.
        device: Only this device of a snapshot.
        capacity: Memory of the GPU, such as "80GiB" or bytes, to compute the headroom.
        headroom: Share of the capacity that should stay free.

    Raises:
        SpecError: The files cannot be read; it lists every problem.

    Examples:
        >>> found = shardwise.memory("snapshot.pickle", capacity="80GiB")
        >>> found.memories[0].peak.allocated_bytes
    """
    size = _bytes(capacity) if isinstance(capacity, str) else capacity
    if size is not None and size <= 0:
        raise SpecError("capacity: must be more than 0, such as 80GiB")
    memories = read_memories(Path(path) for path in paths)
    if device is not None:
        known = sorted({one.device for one in memories if one.device is not None})
        memories = [one for one in memories if one.device == device]
        if not memories:
            listed = ", ".join(map(str, known)) or "none"
            raise SpecError(f"device: {device} is not in the recording; it has devices {listed}")
    return MemoryAnalysis(tuple(memories), size, headroom)


def _bytes(text: str) -> int:
    """Parse a size such as "80GiB" to bytes; raise SpecError if it is not a size."""
    try:
        return parse_bytes(text)
    except QuantityError as error:
        raise SpecError(f"capacity: {error}") from None
