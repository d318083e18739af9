"""What happens when ranks of a run fail: who failed, whether to start again, and what it cost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.train import RestartSettings
from shardwise.train.heartbeat import Beat
from shardwise.train.watch import Hang, Watch, kill

# Exit codes of what would happen again: input that cannot be meant, data or numbers that are wrong.
LASTING = (2, 3)
# The exit code of a rank that failed because it lost another.
LOST = 4
RECOVERIES = "recoveries.jsonl"
# How long a rank that others have lost may take to fail itself.
_LOST_S = 5.0


class Supervisor:
    """Of the processes of this machine, over all attempts of a run."""

    def __init__(
        self, beats: Path, folder: Path, processes: int, settings: RestartSettings
    ) -> None:
        self._watch, self._folder, self._settings = Watch(beats), folder, settings
        self._processes = processes
        self._attempt = 0
        # Attempts since the last step that was saved.
        self._saved, self._in_vain = -1, 0
        self._hang: Hang | None = None
        self._killed = False
        self._failures: dict[int, int] = {}
        self._recovery: dict[str, Any] | None = None
        self._detected = 0.0
        self.stopped_by: int | None = None

    def begin(self) -> None:
        """Processes are about to be started."""
        self._watch.begin()
        self._attempt += 1
        self._hang, self._killed, self._failures = None, False, {}

    def look(self) -> None:
        """At processes that are all alive: does each go on?"""
        if self._killed:
            # They have only to end, and on the way look as if they no longer hung.
            return
        hang, doomed = self._watch.look()
        if not self._watch.worried:
            self._hang = None
        if hang is not None:
            self._hang = hang
            self.say(f"{hang.sentence}; stacks are in {self._write_stacks(hang)}")
        kill(doomed)
        self._killed = bool(doomed)
        if self._recovery is not None:
            self._follow(self._recovery)

    def failed(self, exit_codes: Mapping[int, int]) -> bool:
        """Ranks have failed, with these codes. Whether the others are to end at once.

        They are not where the only ones to fail have lost another: who that was is not known yet.
        """
        if not self._failures:
            self._failures = dict(exit_codes)
            self._detected = time.monotonic()
        elif all(code == LOST for code in self._failures.values()):
            self._failures |= exit_codes
        first = all(code == LOST for code in self._failures.values())
        return not first or time.monotonic() - self._detected > _LOST_S

    def again(self) -> bool:
        """Whether to start again after the failures that were told."""
        beats = self._watch.beats()
        self._count(beats)
        if self.stopped_by is not None:
            return False
        if any(code in LASTING for code in self._failures.values()):
            return False
        cause = self._cause(beats)
        if self._in_vain >= self._settings.attempts:
            times = f"{self._in_vain} attempts" if self._in_vain > 1 else "an attempt"
            self.say(f"{cause}; not started again after {times} without a new checkpoint")
            return False
        self._in_vain += 1
        if not self._failures:
            self._detected = time.monotonic()
        first = min((beat.since for beat in beats), default=self._detected)
        # Who fails while coming back has to come back to where it was before.
        before = self._recovery["failed_step"] if self._recovery is not None else -1
        self._recovery = {
            "attempt": self._attempt,
            "cause": cause,
            "failed_step": max([before, *(beat.step for beat in beats)]),
            # Of a hang, since the last sign of life; a death is seen at the next look.
            "detect_s": self._detected - first if self._hang is not None else 0.1,
        }
        self.say(f"{cause}; starting again")
        return True

    def ended(self) -> None:
        """The run is over: a recovery that did not come to its end is told as far as it came."""
        if self.stopped_by is None:
            # Someone told the processes themselves.
            signals = [beat.stopped_by for beat in self._watch.beats() if beat.stopped_by]
            self.stopped_by = signals[0] if signals else None
        if self._recovery is not None:
            self._write(self._recovery)

    def _count(self, beats: list[Beat]) -> None:
        saved = max((beat.saved for beat in beats), default=-1)
        if saved > self._saved:
            self._saved, self._in_vain = saved, 0

    def culprit(self) -> tuple[int, int] | None:
        """The rank whose failure came before that of others, and its exit code."""
        hung = self._hang.culprits if self._hang is not None else []
        # Who hung comes before who was killed, that before who failed, and that before those who
        # lost a peer by it.
        return min(
            self._failures.items(),
            key=lambda item: (item[0] not in hung, item[1] == LOST, item[1] > 0),
            default=None,
        )

    def _cause(self, beats: list[Beat]) -> str:
        if self._hang is not None:
            return self._hang.sentence
        culprit = self.culprit()
        if culprit is None:
            return "processes of another machine left"
        rank, code = culprit
        where = {beat.rank: beat for beat in beats}.get(rank)
        at = ""
        if where is not None and where.step >= 0:
            at = f" in step {where.step}, section '{where.section}'"
        if code < 0:
            return f"rank {rank} was killed by signal {-code}{at}"
        if code == LOST:
            return f"rank {rank} lost its connection to another{at}"
        return f"rank {rank} failed with exit code {code}{at}"

    def _follow(self, recovery: dict[str, Any]) -> None:
        """Fill in what the new processes have reached."""
        beats = self._watch.beats()
        if len(beats) < self._processes:
            return
        recovery.setdefault("restart_s", time.monotonic() - self._detected)
        if any(not beat.ready_at for beat in beats):
            return
        if "load_s" not in recovery:
            loaded = max(beat.loaded for beat in beats)
            recovery["loaded_step"] = loaded if loaded >= 0 else None
            recovery["load_s"] = max(beat.ready_at for beat in beats) - self._detected
            recovery["replayed_steps"] = max(0, recovery["failed_step"] - max(0, loaded))
        if min(beat.step for beat in beats) < recovery["failed_step"]:
            return
        recovery["regained_s"] = time.monotonic() - self._detected
        self._recovery = None
        self._write(recovery)
        loaded = recovery["loaded_step"]
        source = f"step {loaded} was loaded" if loaded is not None else "started anew"
        self.say(
            f"back at step {recovery['failed_step']} after {recovery['regained_s']:.1f} s: "
            f"{source} after {recovery['load_s']:.1f} s, "
            f"{recovery['replayed_steps']} steps made again"
        )

    def _write(self, recovery: Mapping[str, Any]) -> None:
        with (self._folder / RECOVERIES).open("a") as file:
            file.write(json.dumps(recovery) + "\n")

    def _write_stacks(self, hang: Hang) -> Path:
        folder = self._folder / "hangs" / f"attempt-{self._attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, stack in hang.stacks.items():
            text = stack or "no stack: the process does not run\n"
            (folder / f"rank-{rank}.txt").write_text(text)
        (folder / "who.txt").write_text(hang.sentence + "\n")
        return folder

    def say(self, sentence: str) -> None:
        print(f"shardwise: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
