"""Train a run in subprocesses, from Python."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from shardwise.launch.child import start_python
from shardwise.launch.environment import FOLDER
from shardwise.launch.launcher import kill_tree
from shardwise.spec.foreign_text import echo
from shardwise.spec.quantity import show_seconds
from shardwise.spec.run import RunSpec, read_run, write_run
from shardwise.step.comparison import Comparison, compare
from shardwise.step.notebook import html_of
from shardwise.step.profile import StepProfile, read_profile

# Number of last log lines that a CommandError quotes.
QUOTED_LINES = 20


class CommandError(RuntimeError):
    """A `shardwise` command in a subprocess failed; the message is the end of its log."""

    def __init__(self, exit_code: int, log: str) -> None:
        self.exit_code = exit_code
        super().__init__(log or f"exit code {exit_code}")


@dataclass(frozen=True)
class TrainedRun:
    """The result of a training. Notebooks display its prediction next to its measurement."""

    # "done", "stopped" or "data ended", as the command line says.
    reason: str
    steps: int
    folder: Path
    # The last values of the log, such as the loss.
    last: Mapping[str, float]
    checkpoint: str | None
    predicted: StepProfile | None
    # None if the run was too short to be measured.
    measured: StepProfile | None

    @property
    def comparison(self) -> Comparison | None:
        """Prediction and measurement, term by term; None if one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return compare(self.predicted, self.measured)

    def __repr__(self) -> str:
        seconds = [
            f", {kind} {show_seconds(profile.time.step_s)} per step"
            for kind, profile in (("predicted", self.predicted), ("measured", self.measured))
            if profile is not None and profile.time is not None
        ]
        return f"TrainedRun('{self.folder}': {self.reason}, {self.steps} steps{''.join(seconds)})"

    def _repr_html_(self) -> str | None:
        return None if self.comparison is None else html_of(self.comparison)


def train(
    run: str | Path | RunSpec,
    *,
    nproc: int | None = None,
    name: str | None = None,
    steps: int | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a run in subprocesses and return its result; log lines go to stderr.

    On Ctrl-C the run saves and stops before KeyboardInterrupt is raised.

    Args:
        run: A run.toml or RunSpec.
        nproc: Processes on this machine; by default the cluster's devices per node.
        name: Name of the run's folder; by default the file's name and the time.
        steps: Steps to train, instead of train.steps.
        resume: Resume the run called `name` from its last intact checkpoint.

    Raises:
        SpecError: The run is invalid.
        CommandError: Training failed; the error quotes the end of its log.

    Examples:
        >>> trained = shardwise.train("run.toml", nproc=2)
        >>> trained.folder, trained.last["loss"], trained.comparison
    """
    options = {"--nproc": nproc, "--name": name, "--steps": steps}
    words = [word for key, value in options.items() if value is not None
             for word in (key, str(value))]  # fmt: skip
    with run_file(run) as file:
        result = json_of_command("train", file, [*words, *(["--resume"] if resume else [])])
    predicted, measured = (
        read_profile(result[kind], kind) if result.get(kind) else None
        for kind in ("predicted", "measured")
    )
    return TrainedRun(
        result["reason"],
        result["steps"],
        Path(result["folder"]),
        result["last"],
        result.get("checkpoint"),
        predicted,
        measured,
    )


@contextmanager
def run_file(run: str | Path | RunSpec) -> Iterator[Path]:
    """Yield the path of a valid run.toml: `run` itself, or a temporary file for a RunSpec."""
    if not isinstance(run, RunSpec):
        read_run(Path(run))
        yield Path(run)
        return
    with TemporaryDirectory() as folder:
        file = Path(folder, "run.toml")
        file.write_text(write_run(run))
        yield file


class CommandResult(NamedTuple):
    """How a command ended: its exit code, its stdout, and whether the timeout killed it."""

    exit_code: int
    output: str
    timed_out: bool


def run_command(
    words: list[str],
    log: Callable[[str], None],
    timeout_s: float | None = None,
    folder: Path | None = None,
) -> CommandResult:
    """Run `shardwise` with the arguments `words` in a subprocess; wait for its end.

    Its working directory is `folder`, if one is given.

    `log` gets each line of its stderr. After `timeout_s` the process and its children are killed.
    Ctrl-C reaches the subprocess as well, which may save before KeyboardInterrupt is raised here; a
    second Ctrl-C kills it.
    """
    inherited = (FOLDER, "RANK", "WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    with start_python(
        *("-m", "shardwise", *words),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", env=environment, cwd=folder,
    ) as process:  # fmt: skip
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            kill_tree(process.pid)

        limit = threading.Timer(timeout_s or 0, kill)
        limit.daemon = True
        reader = threading.Thread(target=_log_lines, args=(process.stderr, log), daemon=True)
        reader.start()
        if timeout_s is not None:
            limit.start()
        try:
            output = _output_of(process)
        except BaseException:
            kill_tree(process.pid)
            raise
        finally:
            limit.cancel()
        reader.join()
        return CommandResult(process.wait(), output, killed.is_set())


def _output_of(process: subprocess.Popen[str]) -> str:
    """All stdout of the process.

    After Ctrl-C, which reaches the process too, KeyboardInterrupt is raised once the process ended.
    """
    assert process.stdout is not None
    try:
        return process.stdout.read()
    except KeyboardInterrupt:
        process.stdout.read()
        raise


def _log_lines(lines: Any, log: Callable[[str], None]) -> None:
    """Call `log` with each line, without its newline."""
    for line in lines:
        log(line.rstrip("\n"))


def json_of_command(command: str, file: Path, words: list[str]) -> dict[str, Any]:
    """Run `shardwise COMMAND FILE WORDS --json`; return the JSON that it prints.

    Its stderr goes to the stderr of this process.

    Raises:
        CommandError: The command printed no JSON.
    """
    last: deque[str] = deque(maxlen=QUOTED_LINES)

    def log(line: str) -> None:
        last.append(line)
        echo(line, err=True)

    ended = run_command([command, str(file), *words, "--json"], log)
    try:
        result: dict[str, Any] = json.loads(ended.output)
    except ValueError:
        raise CommandError(ended.exit_code, "\n".join(last)) from None
    return result
