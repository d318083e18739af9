"""The shell command that starts a run."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.cluster import ClusterSpec


def start_command(cluster: ClusterSpec, run: Path) -> str:
    """The shell command that starts a run on a cluster."""
    if cluster.nodes == 1:
        return f"shardwise train {run} --nproc {cluster.devices_per_node}"
    if cluster.parts is not None:
        # Shares go by rank, so that hosts must have the ranks of their part.
        return (
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
            f"--node-rank N --master-addr HOST --master-port 29400 -m shardwise train {run}"
        )
    return (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m shardwise train {run}"
    )
