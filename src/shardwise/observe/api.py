"""Explain the traces of a run, from Python."""

from __future__ import annotations

from pathlib import Path

from shardwise.observe.analysis import Trace, read_traces
from shardwise.observe.rules import Rules, read_rules
from shardwise.observe.run_folder import trace_files
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster


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
