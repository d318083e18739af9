"""The command as a shell starts it, in a process of its own.

Importing what a command needs takes longer than most answers. So a command that starts no
processes is forked from the process of the tests, which has imported it: its own folder,
environment, streams and exit code, at a third of the cost.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "shardwise")
# Only what never ends takes longer: a machine may be ten times slower than the one before.
PATIENCE_S = 900.0


def environment(**more: str) -> dict[str, str]:
    """Of a shell of 80 columns that is no rank of a run and finds the modules of tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**kept, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": here, **more}


# Commands that start neither processes nor threads.
FORKED = ("plan", "estimate", "whatif", "catalog", "trace", "diff", "memory", "runs", "report",
          "contribute", "fsck", "export", "import")  # fmt: skip


def shardwise(
    *words: str, folder: Path | None = None, timeout: float = PATIENCE_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, with more variables in its environment; it may fail."""
    if hasattr(os, "fork") and words and (words[0] in FORKED or "--help" in words):
        return forked(words, folder, environment(**variables), timeout)
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def forked(
    words: tuple[str, ...], folder: Path | None, variables: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork of this process."""
    if words[0] in FORKED:
        import_module(f"shardwise.cli.{words[0]}{'_' * iskeyword(words[0])}")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _run_in_child(words, folder, variables, timeout, (out.fileno(), err.fileno()))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(words, timeout)
        for stream in (out, err):
            stream.seek(0)
        printed, told = (stream.read().decode("utf-8") for stream in (out, err))
    return subprocess.CompletedProcess(words, code, printed, told)


def _run_in_child(
    words: tuple[str, ...],
    folder: Path | None,
    variables: dict[str, str],
    timeout: float,
    streams: tuple[int, int],
) -> None:
    """Do what `python -m shardwise` does, and never return."""
    signal.alarm(int(timeout))
    connect(*streams)
    os.chdir(folder or ".")
    run_and_exit(words, variables)


def connect(stdout: int, stderr: int) -> None:
    """Let this process, a fork, print to these streams."""
    for number, (stream, name) in enumerate(((stdout, "stdout"), (stderr, "stderr")), start=1):
        os.dup2(stream, number)
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def run_and_exit(words: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Be the command, in this process, which has an environment of these variables only."""
    code = 0
    try:
        os.environ.clear()
        os.environ.update(variables)
        # As an interpreter starts, whatever a test has asked for.
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning,
                         ResourceWarning):  # fmt: skip
            warnings.simplefilter("ignore", category)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads do not survive a fork
        sys.argv = ["shardwise", *words]
        runpy.run_module("shardwise", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def refusal(*words: str) -> list[str]:
    """The sentences with which a command refuses its input, run in this process."""
    from typer.testing import CliRunner

    from shardwise.cli.main import add_commands, app
    from shardwise.spec.record import SpecError

    if not app.registered_commands:
        add_commands()
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, SpecError), done.output
    assert done.stdout == ""
    return done.exception.problems
