"""Torch's elastic agent, with someone who says when to start again and when to give up."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.train.supervisor import Supervisor

# Signals that ask for an end, in the terminal or by a scheduler.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class GaveUpError(Exception):
    """The workers failed and are not started again."""

    def __init__(self, failures: Mapping[int, ProcessFailure]) -> None:
        super().__init__()
        self.failures = failures


class Agent(LocalElasticAgent):
    """Starts workers, looks after them, and starts them again as long as the supervisor says so.

    As a context it passes signals on to the workers, which then save and stop together.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, supervisor: Supervisor) -> None:
        super().__init__(spec=spec, logs_specs=logs, exit_barrier_timeout=60)
        # What it tells of processes that end, the supervisor tells better.
        logging.getLogger(multiprocessing.api.__name__).disabled = True
        self._supervisor = supervisor
        self._failures: Mapping[int, ProcessFailure] = {}
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

    def _pass_on(self, number: int, _: Any) -> None:
        again = self._supervisor.stopped_by is not None
        self._supervisor.stopped_by = number
        # Who asks twice means at once.
        sent = signal.SIGKILL if again and number == signal.SIGINT else signal.SIGTERM
        for worker in self._worker_group.workers:
            with suppress(ProcessLookupError, TypeError, ValueError):
                os.kill(int(worker.id), sent)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._supervisor.begin()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_with_the_first(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._supervisor.look()
        self._failures = result.failures
        return result

    def _end_with_the_first(self, worker_group: WorkerGroup) -> None:
        """Once a worker has failed, nothing that the others do is of use.

        Torch would ask them to end, and give those that cannot hear half a minute.
        """
        ended = {worker.global_rank: _exit_code(worker.id) for worker in worker_group.workers}
        failed = {rank: code for rank, code in ended.items() if code}
        if failed and self._supervisor.failed(failed):
            for worker in worker_group.workers:
                if ended[worker.global_rank] is None:
                    os.kill(int(worker.id), signal.SIGKILL)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        again = self._supervisor.again()
        self._stop_workers(worker_group)
        if not again:
            raise GaveUpError(self._failures)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # A rank that waits for one that is gone, or is stopped, hears no other signal.
        self._shutdown(signal.SIGKILL)


def _exit_code(pid: Any) -> int | None:
    """How a child ended, negative if by a signal; None while it runs. It stays to be waited for."""
    try:
        found = os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, TypeError, ValueError):
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
