"""Save, kill and resume: the result must equal that of an undisturbed run, to the bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.spec.run import write_run
from shardwise.trials.accept import workload
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run
from shardwise.trials.accept.ranks import last_words
from shardwise.trials.accept.victim import KillableRun, train_command

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench

RANK_KILLED, ALL_KILLED = "one rank killed", "all killed, then --resume"
EQUAL = "result"
EVERY_BYTE = "as if undisturbed"
# Restarts that the run may make (train.restart.attempts).
ATTEMPTS = 3


class KillSchedule(NamedTuple):
    """The steps of a run, the steps between its saves, and the steps after which it is killed.

    `rank_killed` is for one rank, `all_killed` for all processes.
    """

    steps: int
    every: int
    rank_killed: int
    all_killed: int


ON_CPU = KillSchedule(steps=30, every=8, rank_killed=10, all_killed=20)
# Steps of milliseconds: long enough that a kill hits the run.
ON_GPU = KillSchedule(steps=600, every=100, rank_killed=150, all_killed=350)


def check_resume(bench: Bench) -> Iterator[Line]:
    """Kill a rank, later all processes, and compare the end with an undisturbed run."""
    moments = ON_CPU if bench.machine.is_cpu else ON_GPU
    several = bench.machine.processes > 1
    bench.say("train undisturbed")
    with _StartedRun(bench, "undisturbed", moments) as calm:
        reference = _finished(calm)
    bench.say("train, kill, resume")
    with _StartedRun(bench, "killed", moments) as run:
        if several:
            yield _kill_a_rank(run, moments)
        else:
            yield not_run(RANK_KILLED, "restarts by itself", "one process has no launcher")
        yield _kill_all(run, moments)
        seen = _finished(run)
    equal = seen == reference
    if not equal:
        yield _difference_line(bench, moments, reference, seen)
        return
    size = sum(len(part) for name, part in seen.items() if name != "losses")
    words = f"{size / 1e6:,.1f} MB equal"
    yield judge(EQUAL, EVERY_BYTE, words, True, bytes=size, losses=len(seen["losses"]))


def _kill_a_rank(run: KillableRun, moments: KillSchedule) -> Line:
    """Kill rank 1; the line says whether the run restarted by itself."""
    expected = "restarts by itself"
    if not run.wait_for_step(moments.rank_killed) or not run.kill(1):
        raise CheckFailedError(f"no rank to kill: {last_words(run.log(), 0)}")
    at = run.step()
    reached = run.wait_for_step(moments.all_killed)
    seen = f"step {at}, then {run.step()}"
    return judge(RANK_KILLED, expected, seen, reached, last_words(run.log(), 0))


def _kill_all(run: KillableRun, moments: KillSchedule) -> Line:
    """Kill all processes and resume the run; the line says whether it continued."""
    expected = "resumes"
    if not run.wait_for_step(moments.all_killed) or not run.running:
        raise CheckFailedError(f"no run to kill: {last_words(run.log(), 0)}")
    at = run.step()
    run.kill_all()
    run.resume()
    reached = run.wait_for_step(at + 1)
    seen = f"step {at}, then {run.step()}"
    return judge(ALL_KILLED, expected, seen, reached, last_words(run.log(), 0))


def _difference_line(
    bench: Bench, moments: KillSchedule, reference: dict[str, Any], seen: dict[str, Any]
) -> Line:
    """The line that says what differs, failed.

    Not run if two undisturbed runs differ too: such a machine cannot show equality.
    """
    pairs = zip(reference["losses"], seen["losses"], strict=False)
    first = next((a[0] for a, b in pairs if a != b), None)
    where = f"losses differ from step {first} on" if first else "bytes of the checkpoint differ"
    bench.say("train undisturbed again")
    with _StartedRun(bench, "again", moments) as again:
        if _finished(again) != reference:
            why = "two undisturbed runs differ too: kernels of this machine are not deterministic"
            return not_run(EQUAL, EVERY_BYTE, why, where)
    return judge(EQUAL, EVERY_BYTE, where, False, "a resumed run is another run")


def _finished(run: KillableRun) -> dict[str, Any]:
    """Wait for the end of a run; return its state. Raises CheckFailedError if it failed."""
    code = run.end()
    if code == -signal.SIGKILL:
        raise CheckFailedError("the run did not end before the deadline; killed")
    if code:
        raise CheckFailedError(last_words(run.log(), code))
    return run.state()


class _StartedRun:
    """A run in its own folder; leaving the context kills its processes."""

    def __init__(self, bench: Bench, name: str, moments: KillSchedule) -> None:
        folder: Path = bench.new_folder(name)
        folder.mkdir()
        run = workload.describe(
            bench.cluster(), workload.sharded(bench.machine.processes), moments.steps,
            log_every=1, measure=False, folder="runs",
            checkpoint={"every": moments.every, "minutes": 0}, restart={"attempts": ATTEMPTS},
        )  # fmt: skip
        # A small model on any device: a checkpoint is compared byte by byte.
        run = run._replace(
            model=workload.model(is_cpu=True), job=run.job.but(seq_len=workload.SEQ_LEN_ON_CPU)
        )
        (folder / "run.toml").write_text(write_run(run))
        command = train_command(bench.machine.processes)
        self._run = KillableRun(folder, command, bench.seconds_left)

    def __enter__(self) -> KillableRun:
        return self._run

    def __exit__(self, *_: object) -> None:
        self._run.close()
