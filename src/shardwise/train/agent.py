"""Torch's elastic agent, with someone who says when to start again and when to give up."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import ExitStack, suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError

from shardwise.train.supervisor import Supervisor
from shardwise.train.watch import kill

# Signals that ask for an end, in the terminal or by a scheduler.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class _Ended(BaseException):  # torch catches exceptions in places where it waits for others
    """The workers are not started again, or for the first time."""


class Agent(LocalElasticAgent):
    """Starts workers, looks after them, and starts them again as long as the supervisor says so.

    As a context it passes signals on to the workers, which then save and stop together.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, supervisor: Supervisor) -> None:
        super().__init__(spec=spec, logs_specs=logs, exit_barrier_timeout=60)
        # What it tells of processes that end, the supervisor tells better.
        logging.getLogger(multiprocessing.api.__name__).disabled = True
        self._supervisor = supervisor
        self._started = False
        self._restore = ExitStack()

    def __enter__(self) -> Agent:
        # Torch would kill what is still saving after half a minute.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        for number in _ENDING:
            before = signal.signal(number, self._pass_on)
            self._restore.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()
        self._worker_group.spec.rdzv_handler.shutdown()

    def run_to_the_end(self) -> bool:
        """Whether all ended well, here."""
        try:
            result = self.run()
        except _Ended:
            return False
        except (RendezvousError, DistError, ConnectionError) as error:
            self._supervisor.say(f"the other machines cannot be reached: {error}")
            return False
        return result is not None and not result.is_failed()

    def _pass_on(self, number: int, _: Any) -> None:
        again = self._supervisor.stopped_by is not None
        self._supervisor.stopped_by = number
        # Who asks twice means at once.
        self._send(signal.SIGKILL if again and number == signal.SIGINT else signal.SIGTERM)
        if not self._started:
            raise _Ended

    def _send(self, number: int) -> None:
        for worker in self._worker_group.workers:
            with suppress(ProcessLookupError, TypeError, ValueError):
                os.kill(int(worker.id), number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._started = False
        if self._supervisor.stopped_by is not None:
            raise _Ended
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._supervisor.begin()
        self._started = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        if self._supervisor.stopped_by is not None:
            # Asked while they were being started, they have not heard it.
            for pid in started.values():
                os.kill(pid, signal.SIGTERM)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._wait_for_the_first(worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._supervisor.look()
        return result

    def _wait_for_the_first(self, worker_group: WorkerGroup) -> bool:
        """Once a worker has failed, nothing that the others do is of use: kill them.

        Torch would ask them to end, and give those that cannot hear half a minute. True while those
        that failed have only lost another, who has not failed yet.
        """
        ended = {worker.global_rank: _exit_code(worker.id) for worker in worker_group.workers}
        failed = {rank: code for rank, code in ended.items() if code}
        if not failed:
            return False
        if not self._supervisor.failed(failed):
            return None in ended.values()
        kill([w.id for w in worker_group.workers if ended[w.global_rank] is None])
        return False

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        again = self._supervisor.again()
        self._stop_workers(worker_group)
        if not again:
            raise _Ended
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # A rank that waits for one that is gone, or is stopped, hears no other signal.
        self._shutdown(signal.SIGKILL)


def _exit_code(pid: Any) -> int | None:
    """How a child ended, negative if by a signal; None while it runs. It stays to be waited for."""
    try:
        found = os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # torch has waited for it: it ended well
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
