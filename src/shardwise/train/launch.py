"""Start the processes of a run through torch's elastic launcher, or join those already started.

torchrun, Slurm and Kubernetes each say in the environment who a process is. Where none does, this
process becomes the launcher of its own copies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from shardwise.spec.record import SpecError

FOLDER = "SHARDWISE_RUN_FOLDER"


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has already made this process one of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def end_with_launcher() -> None:
    """Ask the kernel to stop this process when the one that launched it dies, however it dies."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() == 1:  # it was gone before the request was made
        os.kill(os.getpid(), signal.SIGTERM)


def kill_tree(pid: int) -> None:
    """Kill a process and all it has started; torch's launcher gives workers sessions of their own.

    Where the system does not tell who started whom, only the process itself.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything; the parent is the second field after it.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    doomed = [pid]
    for one in doomed:
        doomed += children.get(one, [])
    for one in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def adopt_slurm(environment: MutableMapping[str, str]) -> bool:
    """Translate what `srun` says into what torch reads; False where there is no Slurm step."""
    if is_worker(environment) or int(environment.get("SLURM_NTASKS", "1")) < 2:
        return False
    if "SLURM_PROCID" not in environment:
        return False
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    tasks = environment.get("SLURM_TASKS_PER_NODE", environment["SLURM_NTASKS"])
    environment["LOCAL_WORLD_SIZE"] = _tasks_here(tasks, int(environment.get("SLURM_NODEID", "0")))
    environment.setdefault("MASTER_ADDR", _first_host(environment))
    # Jobs that share a node must not share a port.
    port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    environment.setdefault("MASTER_PORT", str(port))
    return True


def _tasks_here(text: str, node: int) -> str:
    """`8(x3),4` means three nodes of 8 tasks and one of 4."""
    counts: list[str] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [count] * int(times.rstrip(")") or 1)
    return counts[min(node, len(counts) - 1)]


def _first_host(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if "[" not in nodes:
        return nodes.split(",")[0] or "127.0.0.1"
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SpecError(f"launch: cannot read the hosts of {nodes!r}: {error}") from None
    return listed.stdout.split()[0]


def launch(arguments: list[str], processes: int, logs: Path) -> int:
    """Run `shardwise` with `arguments` as `processes` workers; returns the exit code.

    What rank 0 prints is shown; what the others print goes to `logs`, and is shown if they fail.
    Several machines join through the variables torchrun itself reads (PET_NNODES,
    PET_RDZV_ENDPOINT, PET_RDZV_ID), which Kubernetes operators set.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes = int(os.environ.get("PET_NNODES", "1"))
    quiet: dict[int, Std] = dict.fromkeys(range(1, processes), Std.ALL)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=os.environ.get("PET_RDZV_ID", uuid.uuid4().hex),
        rdzv_backend=os.environ.get("PET_RDZV_BACKEND", "c10d"),
        rdzv_endpoint=os.environ.get("PET_RDZV_ENDPOINT", "127.0.0.1:0"),
        local_addr=None if nodes > 1 else "127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=quiet),
    )
    # Workers that share a machine share its cores; train.threads decides more finely.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    command = [sys.executable, "-m", "shardwise", *arguments]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _show_failure(rank, failure.exitcode, logs)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        # The workers were told too, and have stopped together.
        return 128 + int(error.sigval)
    return 0


def _show_failure(rank: int, code: int, logs: Path) -> None:
    """Rank 0 has said itself what went wrong; of the others, show the end of what they said."""
    if code < 0:
        print(f"error: rank {rank} was killed by signal {-code}", file=sys.stderr)  # noqa: T201
    if rank == 0:
        return
    for file in sorted(logs.rglob(f"{rank}/stderr.log")):
        lines = file.read_text(errors="replace").splitlines()[-20:]
        if lines:
            print(f"rank {rank} said:", *lines, sep="\n  ", file=sys.stderr)  # noqa: T201
