"""Decide after a failure which rank failed first and whether to restart; record recoveries."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.train import RestartSettings
from shardwise.train.hang_detector import Hang, HangDetector, kill_processes
from shardwise.train.heartbeat import Heartbeat

# Exit codes that a restart would only repeat: invalid input, unequal data or a non-finite gradient.
PERMANENT_FAILURES = (2, 3)
# Exit code of a rank that failed because it lost its connection to another.
PEER_LOST = 4
RECOVERIES = "recoveries.jsonl"
# Seconds in which the rank that others lost is expected to fail itself.
_PEER_LOST_S = 5.0


def count_recoveries(folder: Path) -> int:
    """The recoveries recorded in a run folder."""
    try:
        return (folder / RECOVERIES).read_bytes().count(b"\n")
    except OSError:
        return 0


class Supervisor:
    """Supervises the ranks of this machine over all attempts of a run."""

    def __init__(
        self, heartbeats: Path, folder: Path, processes: int, settings: RestartSettings
    ) -> None:
        self._detector, self._folder, self._settings = HangDetector(heartbeats), folder, settings
        self._processes = processes
        self._attempt = 0
        # The last saved step, and the attempts since it was saved.
        self._saved, self._attempts_without_save = -1, 0
        self._hang: Hang | None = None
        self._killed = False
        self._failures: dict[int, int] = {}
        self._recovery: dict[str, Any] | None = None
        # When all ranks were last seen alive, and when the failure was detected.
        self._alive_at = self._detected_at = 0.0
        self.stopped_by: int | None = None

    def start_attempt(self) -> None:
        """Forget the last attempt; called before processes are started."""
        self._detector.reset()
        self._attempt += 1
        self._hang, self._killed, self._failures = None, False, {}
        self._alive_at = time.monotonic()

    def all_alive(self) -> None:
        """Note that no rank has failed until now."""
        self._alive_at = time.monotonic()

    def is_training(self) -> bool:
        """Whether every rank has begun its first step, and so handles signals."""
        heartbeats = self._detector.heartbeats()
        return len(heartbeats) == self._processes and all(one.step > 0 for one in heartbeats)

    def poll(self) -> None:
        """Check the progress of ranks that are all alive; kill them if one hangs."""
        if self._killed:
            # They are dying, and on the way may look as if they no longer hung.
            return
        hang, pids = self._detector.poll()
        if not self._detector.is_hanging:
            self._hang = None
        if hang is not None:
            self._hang = hang
            self.log(f"{hang.message}. Stacks: {self._write_stacks(hang)}")
        kill_processes(pids)
        self._killed = bool(pids)
        if self._recovery is not None:
            self._follow(self._recovery)

    def add_failures(self, exit_codes: Mapping[int, int]) -> bool:
        """Note the exit codes of failed ranks; return whether to kill the remaining ones now.

        While every failed rank only lost another one, the first failure is still unknown.
        """
        if not self._failures:
            self._failures = dict(exit_codes)
            self._detected_at = time.monotonic()
        elif all(code == PEER_LOST for code in self._failures.values()):
            self._failures |= exit_codes
        only_lost = all(code == PEER_LOST for code in self._failures.values())
        return not only_lost or time.monotonic() - self._detected_at > _PEER_LOST_S

    def should_restart(self) -> bool:
        """Whether to start the ranks again after the failures noted so far."""
        heartbeats = self._detector.heartbeats()
        self._count_attempt(heartbeats)
        if self.stopped_by is not None:
            return False
        if any(code in PERMANENT_FAILURES for code in self._failures.values()):
            return False
        cause = self._cause(heartbeats)
        if self._attempts_without_save >= self._settings.attempts:
            count = self._attempts_without_save
            attempts = f"{count} restart{'s' if count != 1 else ''}"
            self.log(f"{cause}. Giving up: {attempts} without a new checkpoint")
            return False
        self._attempts_without_save += 1
        detect_s = self._detection_time(heartbeats)
        # A rank that fails during a recovery must get back to where it was before both failures.
        before = self._recovery["failed_step"] if self._recovery is not None else 0
        self._recovery = {
            "attempt": self._attempt,
            "cause": cause,
            "failed_step": max([before, *(one.step for one in heartbeats)]),
            **({} if detect_s is None else {"detect_s": detect_s}),
        }
        self.log(f"{cause}. Restarting")
        return True

    def _detection_time(self, heartbeats: list[Heartbeat]) -> float | None:
        """Seconds until the failure was detected, measured; None where nothing tells.

        Of a hang, since the last heartbeat. Of a failed process, since the last poll that saw it
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
        saved = max((one.saved for one in heartbeats), default=-1)
        if saved > self._saved:
            self._saved, self._attempts_without_save = saved, 0

    def first_failure(self) -> tuple[int, int] | None:
        """The rank whose failure caused the others, and its exit code."""
        hanging = self._hang.ranks if self._hang is not None else []
        # A hang causes a kill, a kill causes an error, an error causes lost peers.
        return min(
            self._failures.items(),
            key=lambda item: (item[0] not in hanging, item[1] == PEER_LOST, item[1] > 0),
            default=None,
        )

    def _cause(self, heartbeats: list[Heartbeat]) -> str:
        if self._hang is not None:
            return self._hang.message
        failure = self.first_failure()
        if failure is None:
            return "ranks of another machine failed"
        rank, code = failure
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
        """Add what the restarted ranks have reached."""
        heartbeats = self._detector.heartbeats()
        if len(heartbeats) < self._processes:
            return
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
        with (self._folder / RECOVERIES).open("a") as file:
            file.write(json.dumps(recovery) + "\n")

    def _write_stacks(self, hang: Hang) -> Path:
        folder = self._folder / "hangs" / f"attempt-{self._attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, stack in hang.stacks.items():
            text = stack or "no stack: the process is stopped or gone\n"
            (folder / f"rank-{rank}.txt").write_text(text)
        (folder / "summary.txt").write_text(hang.message + "\n")
        return folder

    def log(self, message: str) -> None:
        print(f"shardwise: {message}", file=sys.stderr, flush=True)  # noqa: T201
