"""Translate the variables of Slurm into those that torch reads."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, MutableMapping

from shardwise.launch.environment import is_worker
from shardwise.spec.record import SpecError


def adopt_slurm(environment: MutableMapping[str, str]) -> bool:
    """Set the variables that torch reads from those of `srun`; return whether it did."""
    # With PET_NNODES one launcher per node starts its own processes and finds the others itself.
    launches = "PET_NNODES" in environment
    if launches or is_worker(environment) or int(environment.get("SLURM_NTASKS", "1")) < 2:
        return False
    if "SLURM_PROCID" not in environment:
        return False
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    tasks = environment.get("SLURM_TASKS_PER_NODE", environment["SLURM_NTASKS"])
    environment["LOCAL_WORLD_SIZE"] = _tasks_here(tasks, int(environment.get("SLURM_NODEID", "0")))
    environment.setdefault("MASTER_ADDR", _first_host(environment))
    # Jobs on the same node need different ports.
    port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    environment.setdefault("MASTER_PORT", str(port))
    return True


def _tasks_here(text: str, node: int) -> str:
    """The number of tasks on node number `node`, from the text of SLURM_TASKS_PER_NODE.

    `8(x3),4` means three nodes of 8 tasks and one of 4.
    """
    counts: list[str] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [count] * int(times.rstrip(")") or 1)
    return counts[min(node, len(counts) - 1)]


def _first_host(environment: Mapping[str, str]) -> str:
    """The name of the job's first host."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if "[" not in nodes:
        return nodes.split(",")[0] or "127.0.0.1"
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SpecError(
            f"launch: cannot list the hosts of {nodes!r} with scontrol: {error}"
        ) from None
    return listed.stdout.split()[0]
