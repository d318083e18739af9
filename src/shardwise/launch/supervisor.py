"""Decide after a failure which rank failed first and whether to restart; record recoveries."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from shardwise.launch.best_effort import BestEffort, append_line
from shardwise.launch.hang_detector import Hang, HangDetector, kill_processes
from shardwise.launch.heartbeat import Heartbeat, request_resize
from shardwise.launch.membership import Fault
from shardwise.launch.say import say
from shardwise.launch.traffic import TrafficMeter
from shardwise.spec.train import RestartSettings

# Exit codes after which a restart would fail again: invalid input, unequal data, or a non-finite
# gradient.
PERMANENT_FAILURES = (2, 3)
# Exit code of a rank that failed because it lost its connection to another.
PEER_LOST = 4
# Exit code of a rank that saved and ended so that other hosts can join.
RESIZED = 5
RECOVERIES = "recoveries.jsonl"
# Seconds in which the rank that others lost is expected to fail itself.
_PEER_LOST_S = 5.0


class OtherHosts(Protocol):
    """The other hosts of a run, to which the supervisor reports and about which it asks."""

    name: str
    blamed: Fault | None

    def report_progress(self, step: int, section: str, waits: bool) -> None: ...

    def report_failure(self, cause: str, lost_peer: bool) -> None: ...

    def faults(self) -> Sequence[Fault]: ...

    def can_grow(self) -> bool: ...

    def can_leave(self) -> bool: ...

    def behind(self) -> str | None: ...


def count_recoveries(folder: Path) -> int:
    """The number of recoveries recorded in a run folder."""
    try:
        return (folder / RECOVERIES).read_bytes().count(b"\n")
    except OSError:
        return 0


class Supervisor:
    """Supervises the ranks of this machine over all attempts of a run."""

    def __init__(
        self,
        heartbeats: Path,
        folder: Path,
        processes: int,
        settings: RestartSettings,
        hosts: OtherHosts | None = None,
    ) -> None:
        self._detector, self._folder, self._settings = HangDetector(heartbeats), folder, settings
        self._heartbeats, self._hosts = heartbeats, hosts
        self._traffic = TrafficMeter(heartbeats)
        # A host of this round that no longer trains, and since when.
        self._fault: Fault | None = None
        self._fault_at = 0.0
        # Whether the ranks wait for those of another host.
        self._waits = False
        # Why no further attempt is made; empty while attempts are made.
        self.gave_up = ""
        self._processes = processes
        self._attempt = 0
        # The last saved step, and the attempts since it was saved.
        self._saved, self._attempts_without_save = -1, 0
        self._hang: Hang | None = None
        self._killed = False
        self._failures: dict[int, int] = {}
        self._recovery: dict[str, Any] | None = None
        self._recording = BestEffort(f"write a recovery to {folder / RECOVERIES}", self.log)
        # Whether rank 0 is on this host, which records what all hosts recover from.
        self._leads = hosts is None
        # When all ranks were last seen alive, and when the failure was detected.
        self._alive_at = self._detected_at = 0.0
        self.stopped_by: int | None = None

    def start_attempt(self) -> None:
        """Reset for a new attempt; called before its processes are started."""
        self._detector.reset()
        self._attempt += 1
        self._hang, self._killed, self._failures = None, False, {}
        self._fault, self._waits = None, False
        self._alive_at = time.monotonic()
        self._note_blame()

    def all_alive(self) -> None:
        """Record that no rank has failed until now."""
        self._alive_at = time.monotonic()

    def is_training(self) -> bool:
        """Whether every rank has begun its first step, and so handles signals."""
        heartbeats = self._detector.heartbeats()
        return len(heartbeats) == self._processes and all(one.step > 0 for one in heartbeats)

    def poll(self) -> None:
        """Check the progress of ranks that are all alive; kill them if one hangs."""
        if self._killed:
            # Killed ranks may look as if they no longer hung until they have ended.
            return
        hang, pids = self._detector.poll()
        if not self._detector.is_hanging:
            self._hang = None
        if hang is not None:
            self._hang = hang
            waits = "; it waits for another host" if self._waits_for_hosts() else ""
            self.log(f"{hang.message}{waits}. Stacks: {self._write_stacks(hang)}")
        if self._hosts is not None:
            pids = self._with_hosts(self._hosts, pids)
        kill_processes(pids)
        self._killed = bool(pids)
        if self._recovery is not None:
            self._follow(self._recovery)

    def leave_others(self) -> bool:
        """Let the ranks of all hosts save, so that the others continue without this host.

        Returns False if they cannot, or there are no others.
        """
        if self._hosts is None or not self.is_training() or not self._hosts.can_leave():
            return False
        request_resize(self._heartbeats)
        return True

    def _with_hosts(self, hosts: OtherHosts, pids: list[int]) -> list[int]:
        """The process ids to kill, given what the other hosts do.

        `pids` are those of ranks here that hang. Also reports progress, and asks to resize if hosts
        wait.
        """
        heartbeats = self._detector.heartbeats()
        if not heartbeats:
            return pids
        last, self._waits = min(heartbeats, key=lambda one: one.step), self._waits_for_hosts()
        hosts.report_progress(last.step, last.section, self._waits)
        if self._has_lost(hosts, last):
            return [one.pid for one in heartbeats]
        self._traffic.sample()
        if pids and self._waits and (self._traffic.is_flowing() or hosts.behind() != ""):
            # Ranks that wait for another host are not the ones that hang; a slow link is no hang.
            return []
        if self.is_training() and hosts.can_grow():
            request_resize(self._heartbeats)
        return pids

    def _waits_for_hosts(self) -> bool:
        """Whether there are other hosts, and all ranks without progress wait in a collective."""
        return self._hosts is not None and self._detector.waits()

    def _has_lost(self, hosts: OtherHosts, last: Heartbeat) -> bool:
        """Whether a host of this round is lost, so that the ranks here cannot continue.

        `last` is the heartbeat of the rank furthest behind. Ranks notice a lost connection
        themselves. This is for those that have none yet, or wait in a library that does not notice.
        """
        faults = sorted(hosts.faults(), key=lambda fault: not fault.sure)
        if not faults:
            self._fault = None
            return False
        now = time.monotonic()
        if self._fault is None:
            self._fault_at = now
        self._fault = faults[0]
        if self._fault.sure:
            return now - self._fault_at > _PEER_LOST_S
        # Only the connection to the server may be silent: training may continue.
        starts = last.step == 0 and now - self._fault_at > 2 * self._settings.lost_after_s
        return starts or self._detector.is_hanging

    def _note_blame(self) -> None:
        """Record which host ended the last attempt, once all hosts have met again."""
        blamed = self._hosts.blamed if self._hosts is not None else None
        if self._recovery is not None and blamed is not None:
            self._recovery["blamed_host"] = blamed.name
            self._recovery["blamed_cause"] = blamed.cause
            self.log(f"Blamed: host {blamed.name}: {blamed.cause}")

    def add_failures(self, exit_codes: Mapping[int, int]) -> bool:
        """Record the exit codes of failed ranks; return whether to kill the remaining ones now.

        While every failed rank only lost another one, the first failure is still unknown.
        """
        if not self._failures:
            self._failures = dict(exit_codes)
            self._detected_at = time.monotonic()
        elif all(code == PEER_LOST for code in self._failures.values()):
            self._failures |= exit_codes
        passed = time.monotonic() - self._detected_at
        if self._is_resizing():
            # The others are still saving.
            return passed > self._settings.slow_after_s
        only_lost = all(code == PEER_LOST for code in self._failures.values())
        return not only_lost or passed > _PEER_LOST_S

    def _is_resizing(self) -> bool:
        """Whether the failed ranks have only saved and ended so that hosts can join or leave."""
        codes = self._failures.values()
        return bool(codes) and all(code == RESIZED for code in codes)

    def should_restart(self) -> bool:
        """Whether to start the ranks again after the failures recorded so far.

        If so, begins to record the recovery. If it gives up, `gave_up` says why.
        """
        heartbeats = self._detector.heartbeats()
        self._count_attempt(heartbeats)
        if self.stopped_by is not None:
            return False
        cause = self._cause(heartbeats)
        if any(code in PERMANENT_FAILURES for code in self._failures.values()):
            self.gave_up = cause
            return False
        if not self._is_resizing():
            if self._attempts_without_save >= self._most_attempts():
                count = self._attempts_without_save
                attempts = f"{count} restart{'s' if count != 1 else ''}"
                self.gave_up = f"{cause}. Giving up: {attempts} without a new checkpoint"
                self.log(self.gave_up)
                return False
            self._attempts_without_save += 1
            if self._hosts is not None:
                self._hosts.report_failure(cause, self._only_lost_peers())
        self._begin_recovery(cause, heartbeats)
        return True

    def _most_attempts(self) -> int:
        """The most restarts without a new checkpoint: train.restart.attempts, or twice as many.

        Twice if the ranks here only lost others, so that this host outlasts the one that is to
        blame.
        """
        outlasts = self._hosts is not None and self._only_lost_peers()
        return self._settings.attempts * (2 if outlasts else 1)

    def _only_lost_peers(self) -> bool:
        """Whether the ranks of this host failed only because they lost those of another."""
        if self._fault is not None and self._killed:
            return True
        lost = all(code == PEER_LOST for code in self._failures.values())
        return lost and (self._hang is None or self._waits)

    def _begin_recovery(self, cause: str, heartbeats: list[Heartbeat]) -> None:
        """Begin the record of a recovery, and log its cause."""
        detect_s = self._detection_time(heartbeats)
        # A rank that fails during a recovery must get back to where it was before both failures.
        before = self._recovery["failed_step"] if self._recovery is not None else 0
        self._recovery = {
            "attempt": self._attempt,
            "cause": cause,
            "failed_step": max([before, *(one.step for one in heartbeats)]),
            **({} if detect_s is None else {"detect_s": detect_s}),
            **({} if self._hosts is None else {"host": self._hosts.name}),
            **({"planned": True} if self._is_resizing() else {}),
        }
        self._follow_rank_0(heartbeats)
        self.log(f"{cause}. Restarting")

    def _follow_rank_0(self, heartbeats: list[Heartbeat]) -> None:
        """Update whether rank 0 is on this host."""
        if heartbeats and self._hosts is not None:
            self._leads = any(one.rank == 0 for one in heartbeats)

    def _detection_time(self, heartbeats: list[Heartbeat]) -> float | None:
        """Seconds until the failure was detected; None if it is on another machine.

        For a hang, since the last heartbeat. For a failed process, since the last poll that saw it
        alive, which is an upper bound.
        """
        if not self._failures:
            # The failure is on another machine.
            self._detected_at = time.monotonic()
            return None
        if self._hang is not None:
            return self._detected_at - min(one.since for one in heartbeats)
        return self._detected_at - self._alive_at

    def finish(self) -> None:
        """Record a recovery that was not completed, and the signal that stopped the run."""
        if self.stopped_by is None:
            # The signal may have been sent to the ranks directly.
            signals = [one.stopped_by for one in self._detector.heartbeats() if one.stopped_by]
            self.stopped_by = signals[0] if signals else None
        if self._recovery is not None:
            self._record(self._recovery)

    def _count_attempt(self, heartbeats: list[Heartbeat]) -> None:
        """Reset the attempts without a checkpoint if the last attempt has saved one."""
        saved = max((one.saved for one in heartbeats), default=-1)
        if saved > self._saved:
            self._saved, self._attempts_without_save = saved, 0

    def first_failure(self) -> tuple[int, int] | None:
        """The rank whose failure caused the others, and its exit code; None if no rank failed."""
        hanging = self._hang.ranks if self._hang is not None else []
        # A hang causes a kill, a kill causes an error, an error causes lost peers.
        return min(
            self._failures.items(),
            key=lambda item: (item[0] not in hanging, item[1] == PEER_LOST, item[1] > 0),
            default=None,
        )

    def _cause(self, heartbeats: list[Heartbeat]) -> str:
        """Why the last attempt ended, as a sentence."""
        if self._fault is not None and self._killed:
            return f"host {self._fault.name}: {self._fault.cause}"
        if self._hang is not None and not (self._waits and self._only_lost_peers()):
            return self._hang.message
        if self._is_resizing():
            return "Hosts join or leave after a checkpoint"
        failure = self.first_failure()
        if failure is None:
            return "ranks of another host failed"
        return self._failure_text(*failure, heartbeats)

    def _failure_text(self, rank: int, code: int, heartbeats: list[Heartbeat]) -> str:
        """How a rank failed, where it was in the step, and its exit code, in words."""
        heartbeat = {one.rank: one for one in heartbeats}.get(rank)
        where = ""
        if heartbeat is not None and heartbeat.step > 0:
            where = f" (step {heartbeat.step}, section {heartbeat.section})"
        if code < 0:
            return f"rank {rank} was killed by signal {-code}{where}"
        if code == PEER_LOST:
            return f"rank {rank} lost its connection to another rank{where}"
        return f"rank {rank} failed with exit code {code}{where}"

    def _follow(self, recovery: dict[str, Any]) -> None:
        """Add to `recovery` what the restarted ranks have reached; record it when complete."""
        heartbeats = self._detector.heartbeats()
        if len(heartbeats) < self._processes:
            return
        self._follow_rank_0(heartbeats)
        recovery.setdefault("restart_s", time.monotonic() - self._detected_at)
        if any(not one.ready_at for one in heartbeats):
            return
        failed_step = recovery["failed_step"]
        if "load_s" not in recovery:
            loaded = max(one.loaded for one in heartbeats)
            recovery["loaded_step"] = loaded if loaded >= 0 else None
            recovery["load_s"] = max(one.ready_at for one in heartbeats) - self._detected_at
            # The failed step itself was not completed.
            recovery["replayed_steps"] = max(0, failed_step - 1 - max(0, loaded))
        if min(one.step for one in heartbeats) < failed_step:
            return
        recovery["regained_s"] = time.monotonic() - self._detected_at
        self._recovery = None
        self._record(recovery)
        loaded = recovery["loaded_step"]
        source = f"resumed from step {loaded}" if loaded is not None else "started from step 0"
        replayed = recovery["replayed_steps"]
        self.log(
            f"Recovered at step {failed_step} after {recovery['regained_s']:.1f} s: {source} "
            f"({recovery['load_s']:.1f} s), {replayed} step{'s' if replayed != 1 else ''} replayed"
        )

    def _record(self, recovery: Mapping[str, Any]) -> None:
        """Append a recovery to recoveries.jsonl, on the host of rank 0 only.

        Planned restarts, by which hosts join or leave, are left out.
        """
        if not self._leads or recovery.get("planned"):
            return
        with self._recording, FileIO(self._folder / RECOVERIES, "a") as file:
            append_line(file, json.dumps(recovery))

    def _write_stacks(self, hang: Hang) -> str:
        """Write the stacks of a hang; return their folder, or why they were not written."""
        folder = self._folder / "hangs" / f"attempt-{self._attempt}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, stack in hang.stacks.items():
                text = stack or "no stack: the process is stopped or gone\n"
                (folder / f"rank-{rank}.txt").write_text(text)
            (folder / "summary.txt").write_text(hang.message + "\n")
        except OSError as error:
            return f"not written: {error}"
        return str(folder)

    def log(self, message: str) -> None:
        say(message)
