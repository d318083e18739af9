"""The command that starts a script with one process per device of a cluster."""

from __future__ import annotations

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.run import RunSpec


def torchrun(cluster: ClusterSpec, program: str) -> str:
    """The torchrun command for `program`, the same on every node; HOST is one of them."""
    processes = f"--nproc-per-node {cluster.devices_per_node}"
    if cluster.nodes > 1:
        meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
        processes = f"--nnodes {cluster.nodes} {processes} {meet}"
    return f"torchrun {processes} {program}"


def script_command(run: RunSpec, name: str) -> str:
    """The command that starts the script `name`: plain python if the strategy is "single"."""
    return f"python {name}" if run.strategy.kind == "single" else torchrun(run.cluster, name)
