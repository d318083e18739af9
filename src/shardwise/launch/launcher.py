"""Start the processes of a run with torch's elastic launcher, or join those already started.

torchrun, Slurm and Kubernetes tell each process its rank in the environment. Without one of them,
this process becomes the launcher of its own copies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launch.heartbeat import FOLDER as HEARTBEATS
from shardwise.spec.foreign_text import echo
from shardwise.spec.record import SpecError
from shardwise.spec.train import RestartSettings

if TYPE_CHECKING:
    from shardwise.launch.host_rendezvous import HostRendezvous
    from shardwise.launch.membership import State
    from shardwise.launch.supervisor import Supervisor
    from shardwise.pytorch.channel import Secret

NO_RESTARTS = RestartSettings(attempts=0)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants; torch's launcher gives workers their own sessions."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                one.kill()


def import_early(processes: int, *, transformers: bool) -> dict[str, str]:
    """Start the process that imports torch for the workers; return its environment.

    Does nothing if it runs. Its imports take as long as those of torch here: if it is started
    before, both end at the same time.

    The environment is all of `os.environ`. OMP_NUM_THREADS is set there, if it is not, so that
    `processes` workers share the machine's cores.
    """
    from shardwise.launch.worker import start_fork_server

    # Workers of one machine share its cores; train.threads overrides this.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return start_fork_server(transformers=transformers)


def launch(
    arguments: list[str],
    processes: int,
    folder: Path,
    settings: RestartSettings = NO_RESTARTS,
    sizes: tuple[int, ...] = (1,),
    *,
    transformers: bool = False,
    secret: Secret | None = None,
    is_done: Callable[[], bool] = lambda: False,
) -> int:
    """Run `shardwise` with `arguments` as `processes` workers; return the exit code.

    The output of rank 0 is shown. The output of other ranks goes to logs in `folder`, and is shown
    if they fail. Several hosts join through the variables that torchrun reads (PET_NNODES,
    PET_RDZV_ENDPOINT, PET_RDZV_ID), which Kubernetes operators set. `sizes` are the numbers of
    hosts on which the run can train, `secret` is the one they share. `transformers` says that the
    run's model is one of transformers. `is_done` returns whether the run is done, for a host that
    comes late.
    """
    from shardwise.launch.worker import variables_since, work

    imported_with = import_early(processes, transformers=transformers)

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    from shardwise.launch.agent import Agent
    from shardwise.launch.rendezvous import LoopbackRendezvous
    from shardwise.launch.supervisor import Supervisor

    logs = folder / "logs"
    redirected: dict[int, Std] = dict.fromkeys(range(1, processes), Std.ALL)
    run_id = os.environ.get("PET_RDZV_ID", uuid.uuid4().hex)
    hosts = _join_hosts(processes, sizes, settings, secret, is_done)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as heartbeats:
        os.environ[HEARTBEATS] = heartbeats
        spec = WorkerSpec(
            role="shardwise",
            local_world_size=processes,
            entrypoint=work,
            args=(variables_since(imported_with), *arguments),
            rdzv_handler=hosts or LoopbackRendezvous(run_id),
            # The supervisor decides whether to restart.
            max_restarts=sys.maxsize if settings.attempts else 0,
            monitor_interval=0.1,
            local_addr=None if hosts is not None else "127.0.0.1",
        )
        supervisor = Supervisor(Path(heartbeats), folder, processes, settings, hosts)
        logs_specs = DefaultLogsSpecs(log_dir=str(logs), redirects=redirected)
        with Agent(spec, logs_specs, supervisor) as agent:
            succeeded = agent.run_to_completion()
            supervisor.finish()
            if hosts is not None:
                hosts.leave(_last_state(succeeded, supervisor, hosts), supervisor.gave_up)
    return _exit_code(succeeded, supervisor, logs, processes)


def _last_state(succeeded: bool, supervisor: Supervisor, hosts: HostRendezvous) -> State:
    """The final state of this host for the others: the run is over, or continues without it."""
    from shardwise.launch.membership import DONE, FAILED, LEFT

    # Ctrl-C stops the run. Other signals come from a scheduler, which takes a host or restarts it.
    if succeeded and supervisor.stopped_by in (None, signal.SIGINT):
        return DONE
    # A host that cannot train ends the run only if the others are too few.
    return FAILED if supervisor.gave_up and not hosts.can_leave() else LEFT


def _join_hosts(
    processes: int,
    sizes: tuple[int, ...],
    settings: RestartSettings,
    secret: Secret | None,
    is_done: Callable[[], bool],
) -> HostRendezvous | None:
    """The rendezvous with other hosts; None for a run of one host."""
    from shardwise.launch.host_rendezvous import HostRendezvous
    from shardwise.launch.rendezvous_address import replica_address
    from shardwise.pytorch.device import connect_from, connect_on_loopback

    if max(sizes) == 1:
        if settings.lighthouse is None:
            connect_on_loopback()
        else:
            # Other replica groups may be on other hosts.
            connect_from(replica_address(settings))
        return None
    if not os.environ.get("PET_RDZV_ID"):
        raise SpecError("PET_RDZV_ID: must be set, to the same word on all hosts of the run")
    hosts = HostRendezvous(os.environ["PET_RDZV_ID"], processes, sizes, settings, secret, is_done)
    connect_from(hosts.address)
    # The place of the host determines its ranks, so torch need not ask the other hosts.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    return hosts


def _exit_code(succeeded: bool, supervisor: Supervisor, logs: Path, processes: int) -> int:
    """The exit code of the launcher; shows the log of the rank that failed first."""
    from shardwise.launch.supervisor import PEER_LOST, RESIZED

    failure = None if succeeded else supervisor.first_failure()
    stopped_by = supervisor.stopped_by
    if stopped_by is not None and (failure is None or failure[1] < 0 or failure[1] == RESIZED):
        return 128 + stopped_by
    if succeeded:
        return 0
    if failure is None:
        return 1
    rank, code = failure
    _show_failure(rank, code, logs, processes)
    return code if code > 0 and code not in (PEER_LOST, RESIZED) else 1


def _show_failure(rank: int, code: int, logs: Path, processes: int) -> None:
    """Print the signal and the last lines of a rank's log; rank 0 has printed its own error."""
    if code < 0:
        echo(f"error: rank {rank} was killed by signal {-code}", err=True)
    if rank == 0:
        return
    # Torch names the folders of logs by the number of a rank on its host.
    place = rank % processes
    files = sorted(logs.rglob(f"{place}/stderr.log"), key=lambda file: file.stat().st_mtime)
    lines = files[-1].read_text(errors="replace").splitlines()[-20:] if files else []
    if lines:
        echo("\n  ".join([f"Last lines of rank {rank}:", *lines]), err=True)
