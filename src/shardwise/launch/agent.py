"""Torch's elastic agent, with restarts decided by the supervisor."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.multiprocessing import spawn

from shardwise.launch.hang_detector import kill_processes
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.worker import START_METHOD, STOP_SIGNALS
from shardwise.pytorch.private import elastic_agent
from shardwise.spec.progress import stages

# A terminal sends SIGINT, a scheduler the others.
_STOP_SIGNALS = (signal.SIGINT, *STOP_SIGNALS)


class _NotStarted(BaseException):  # torch catches Exception where it waits for other machines
    """Ends the agent: the workers are not started, or not started again."""


class Agent:
    """Starts workers, polls them, and restarts them as long as the supervisor decides so.

    As a context manager it forwards signals to the workers, which then save and stop together.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, supervisor: Supervisor) -> None:
        self._agent = elastic_agent(spec, logs, self, START_METHOD)
        # The supervisor's messages replace torch's.
        for module in (multiprocessing.api.__name__, spawn.__module__):
            logging.getLogger(module).disabled = True
        self._supervisor = supervisor
        self._started = False
        self._restore = ExitStack()

    def __enter__(self) -> Agent:
        # Torch's own handler would kill workers that still save after 30 seconds.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        for number in _STOP_SIGNALS:
            before = signal.signal(number, self._forward_signal)
            self._restore.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        stages.end()
        self._restore.close()
        self._agent.get_worker_group().spec.rdzv_handler.shutdown()

    def run_to_completion(self) -> bool:
        """Run all attempts; return whether the workers of this machine succeeded.

        True too if the run ended on other hosts, which did not need this one.
        """
        try:
            result = self._agent.run()
        except _NotStarted:
            return False
        except (RendezvousError, DistError, ConnectionError) as error:
            self._supervisor.log(f"cannot train with the other hosts: {error}")
            return False
        # Without a result the run has ended on the other hosts, which did not need this one.
        return result is None or not result.is_failed()

    def _forward_signal(self, number: int, _: Any) -> None:
        """Pass a signal on to the workers, as the one that makes them stop as they should."""
        repeated = self._supervisor.stopped_by is not None
        self._supervisor.stopped_by = number
        if repeated and number == signal.SIGINT:
            self._send(signal.SIGKILL)  # a second Ctrl-C stops without saving
        elif number != signal.SIGINT and self._supervisor.leave_others():
            pass  # a scheduler takes this host only; Ctrl-C stops the run
        elif number != signal.SIGHUP and self._supervisor.is_training():
            self._send(number)  # so that rank 0 can say which signal it was
        else:
            self._send(signal.SIGTERM)  # ends a process that is still starting, silently
        if not self._started:
            raise _NotStarted

    def _send(self, number: int) -> None:
        """Send a signal to all workers of this machine."""
        for worker in self._agent.get_worker_group().workers:
            with suppress(ProcessLookupError, TypeError, ValueError):
                os.kill(int(worker.id), number)

    # ---- called by torch's agent ----------------------------------------------------------------

    def before_rendezvous(self) -> None:
        """Raise _NotStarted if a signal has stopped the run."""
        self._started = False
        if self._supervisor.stopped_by is not None:
            raise _NotStarted

    def before_start(self) -> None:
        self._supervisor.start_attempt()
        self._started = True

    def after_start(self, processes: Iterable[int]) -> None:
        stages.end()  # rank 0 shows its own
        if self._supervisor.stopped_by is not None:
            # The signal arrived before these processes existed.
            for pid in processes:
                os.kill(pid, signal.SIGTERM)

    def waits_for_first_failure(self, codes: dict[int, int | None]) -> bool:
        """Whether torch should not see a failure yet; kills the remaining workers if it should.

        `codes` are the exit codes by rank, negative for a signal, None while the rank runs. True
        while every failed worker only lost its connection to another one, which has not failed yet.
        Torch would ask the remaining workers to end, and wait half a minute for those that cannot
        respond.
        """
        failed = {rank: code for rank, code in codes.items() if code}
        if not failed:
            self._supervisor.all_alive()
            return False
        if not self._supervisor.add_failures(failed):
            return None in codes.values()
        workers = self._agent.get_worker_group().workers
        kill_processes([w.id for w in workers if codes[w.global_rank] is None])
        return False

    def all_healthy(self) -> None:
        self._supervisor.poll()

    def before_restart(self) -> None:
        """Raise _NotStarted if the supervisor decides against a restart."""
        if not self._supervisor.should_restart():
            raise _NotStarted
