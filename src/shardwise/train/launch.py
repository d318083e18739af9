"""Start the processes of a run with torch's elastic launcher, or join those already started.

torchrun, Slurm and Kubernetes tell each process its rank in the environment. Where none does, this
process becomes the launcher of its own copies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise.spec.foreign_text import echo
from shardwise.spec.record import SpecError
from shardwise.spec.train import RestartSettings
from shardwise.train.heartbeat import FOLDER as HEARTBEATS

if TYPE_CHECKING:
    from shardwise.engine.channel import Secret
    from shardwise.train.host_rendezvous import HostRendezvous
    from shardwise.train.membership import State
    from shardwise.train.supervisor import Supervisor

FOLDER, PARENT = "SHARDWISE_RUN_FOLDER", "SHARDWISE_PARENT"
# Tells workers the `shardwise train` command that resumes the run.
RESUME_COMMAND = "SHARDWISE_RESUME_COMMAND"
HOSTS = "PET_NNODES"
NO_RESTARTS = RestartSettings(attempts=0)


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has made this process one of several ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


class HostRange(NamedTuple):
    """The least and the most hosts that train together."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most


def host_range(text: str | None = None) -> HostRange:
    """A number of hosts, `4` or `1:4`; by default from the variable that torchrun reads."""
    name = HOSTS if text is None else "--nnodes"
    text = os.environ.get(HOSTS, "1") if text is None else text
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < least <= most:
        raise SpecError(f"{name}: {text!r} is neither a number of hosts nor a range such as 1:4")
    return HostRange(least, most)


def signal_of_end() -> signal.Signals:
    """The signal by which ranks end with their launcher: they save and stop, if they are all.

    Ranks of other hosts would stop with them. Without this signal those lose a host, and continue.
    """
    return signal.SIGTERM if host_range().most == 1 else signal.SIGKILL


def end_with_launcher() -> None:
    """Ask the kernel to send a signal to this process when its launcher dies, however it dies.

    PARENT names the launcher: in a container it may be process 1.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal_of_end())
    parent = int(os.environ.get(PARENT, os.getppid()))
    if os.getppid() != parent:  # the launcher died before the request
        os.kill(os.getpid(), signal_of_end())


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants; torch's launcher gives workers their own sessions."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                one.kill()


def import_early(processes: int, *, transformers: bool) -> dict[str, str]:
    """Start the process that imports for the workers, if it is not started; its environment.

    It takes as long as importing torch here does: started before, both are done at the same time.
    """
    from shardwise.train.worker import import_once

    # Workers of one machine share its cores; train.threads overrides this.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return import_once(transformers=transformers)


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
    hosts on which the run can train, `secret` is what they share. With `transformers`, its model
    comes from there. `is_done` tells a host that comes late that the run is done.
    """
    from shardwise.train.worker import variables_since, work

    imported_with = import_early(processes, transformers=transformers)

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    from shardwise.train.agent import Agent
    from shardwise.train.rendezvous import LoopbackRendezvous
    from shardwise.train.supervisor import Supervisor

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
    """What the other hosts are told: the run is over, or goes on without this host."""
    from shardwise.train.membership import DONE, FAILED, LEFT

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
    from shardwise.engine.device import connect_from, connect_on_loopback
    from shardwise.train.host_rendezvous import HostRendezvous
    from shardwise.train.rendezvous_address import replica_address

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
    # Ranks follow from the place of the host, without asking the others.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    return hosts


def _exit_code(succeeded: bool, supervisor: Supervisor, logs: Path, processes: int) -> int:
    """The exit code of the launcher; shows the log of the rank that failed first."""
    from shardwise.train.supervisor import PEER_LOST, RESIZED

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
    """Print the signal and the end of a rank's log; rank 0 has printed its error itself."""
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
