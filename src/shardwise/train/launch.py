"""Start the processes of a run through torch's elastic launcher, or join those already started.

torchrun, Slurm and Kubernetes each say in the environment who a process is. Where none does, this
process becomes the launcher of its own copies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.train import RestartSettings
from shardwise.train.heartbeat import FOLDER as HEARTBEATS

FOLDER, PARENT = "SHARDWISE_RUN_FOLDER", "SHARDWISE_PARENT"
ONCE = RestartSettings(attempts=0)


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has already made this process one of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def machines() -> int:
    """How many are to join, by the variable torchrun itself reads."""
    return int(os.environ.get("PET_NNODES", "1"))


def end_with_launcher() -> None:
    """Ask the kernel to stop this process when the one that launched it dies, however it dies.

    Who that is, PARENT says: in a container it may well be process 1.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    parent = int(os.environ.get(PARENT, os.getppid()))
    if os.getppid() != parent:  # it was gone before the request was made
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


def launch(
    arguments: list[str], processes: int, folder: Path, settings: RestartSettings = ONCE
) -> int:
    """Run `shardwise` with `arguments` as `processes` workers; returns the exit code.

    What rank 0 prints is shown; what the others print goes to the logs in `folder`, and is shown
    if they fail. Several machines join through the variables torchrun itself reads (PET_NNODES,
    PET_RDZV_ENDPOINT, PET_RDZV_ID), which Kubernetes operators set.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    from shardwise.train.agent import Agent
    from shardwise.train.rendezvous import find_rendezvous
    from shardwise.train.supervisor import LOST, Supervisor

    logs = folder / "logs"
    nodes = machines()
    quiet: dict[int, Std] = dict.fromkeys(range(1, processes), Std.ALL)
    # Workers that share a machine share its cores; train.threads decides more finely.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if nodes == 1:
        # Nobody else needs to reach them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as beats:
        os.environ[HEARTBEATS], os.environ[PARENT] = beats, str(os.getpid())
        spec = WorkerSpec(
            role="shardwise",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-m", "shardwise", *arguments),
            rdzv_handler=find_rendezvous(nodes),
            # The supervisor decides whether there is another.
            max_restarts=sys.maxsize if settings.attempts else 0,
            monitor_interval=0.1,
            local_addr=None if nodes > 1 else "127.0.0.1",
        )
        supervisor = Supervisor(Path(beats), folder, processes, settings)
        logs_specs = DefaultLogsSpecs(log_dir=str(logs), redirects=quiet)
        with Agent(spec, logs_specs, supervisor) as agent:
            done = agent.run_to_the_end()
        supervisor.ended()
    culprit = None if done else supervisor.culprit()
    stopped_by = supervisor.stopped_by
    if stopped_by is not None and (culprit is None or culprit[1] < 0):
        return 128 + stopped_by
    if done:
        return 0
    if culprit is None:
        return 1
    rank, code = culprit
    _show_failure(rank, code, logs)
    return code if 0 < code != LOST else 1


def _show_failure(rank: int, code: int, logs: Path) -> None:
    """Rank 0 has said itself what went wrong; of the others, show the end of what they said."""
    if code < 0:
        print(f"error: rank {rank} was killed by signal {-code}", file=sys.stderr)  # noqa: T201
    if rank == 0:
        return
    said = sorted(logs.rglob(f"{rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    lines = said[-1].read_text(errors="replace").splitlines()[-20:] if said else []
    if lines:
        print(f"rank {rank} said:", *lines, sep="\n  ", file=sys.stderr)  # noqa: T201
