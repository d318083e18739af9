"""Calls in forks of a small process, which has imported what they need and nothing else.

So the memory of a call is its own. A fork of a worker of pytest begins with what the tests before
it have taken, and so does a program that such a worker starts, as the system counts it.

    python -m tests.forks MODULE …    import these modules, then make the calls that stdin asks for
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardwise.launch.child import start_python
from tests.command import PATIENCE_S, connect, environment, run_and_exit

# Seconds after SIGTERM until a call is killed.
GRACE_S = 20.0


class Ended(NamedTuple):
    """How a call ended: its exit code, what it printed, and the most memory of a process of it."""

    code: int
    text: str
    peak_bytes: int


class Forks:
    """The small process, and the calls that it makes; a context."""

    def __init__(self, *modules: str) -> None:
        self._process = start_python(
            *("-m", "tests.forks", *modules),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True,
        )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def call(
        self,
        function: str,
        *arguments: Any,
        folder: Path,
        seconds: float = PATIENCE_S,
        cpu: int = 120,
    ) -> Ended:
        """Call `module:function` in `folder`, with a limit of CPU seconds.

        After `seconds` it gets SIGTERM.
        """
        asked = {"function": function, "arguments": arguments, "folder": str(folder)}
        print(json.dumps({**asked, "seconds": seconds, "cpu": cpu}),
              file=self._process.stdin, flush=True)  # fmt: skip
        assert self._process.stdout is not None
        return Ended(*json.loads(self._process.stdout.readline()))

    def command(
        self, *words: str, folder: Path, seconds: float = PATIENCE_S, **variables: str
    ) -> Ended:
        """Run the command in `folder`, with more variables in its environment."""
        return self.call("tests.forks:be_command", words, environment(**variables),
                         folder=folder, seconds=seconds)  # fmt: skip


def be_command(words: list[str], variables: dict[str, str]) -> None:
    """The command of these words, in this fork."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run_and_exit(words, variables)


def _main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    # Only replies go to stdout, whatever an import prints.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_made(**json.loads(line))), file=replies, flush=True)


def _made(
    function: str, arguments: list[Any], folder: str, seconds: float, cpu: int
) -> tuple[int, str, int]:
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)
    with tempfile.TemporaryFile() as stream:
        child = os.fork()
        if child == 0:
            _become(stream, folder, cpu)
            try:
                called(*arguments)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        status, usage = _wait(child, seconds)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started and left behind
        stream.seek(0)
        text = stream.read().decode("utf-8", "surrogateescape")
    return os.waitstatus_to_exitcode(status), text, usage.ru_maxrss << 10


def _become(stream: BinaryIO, folder: str, cpu: int) -> None:
    """Make this fork a process of its own."""
    os.setsid()
    connect(stream.fileno(), stream.fileno())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    os.chdir(folder)


def _wait(child: int, seconds: float) -> tuple[int, resource.struct_rusage]:
    """The status and the usage of a child, which is asked to end and then killed if it does not."""
    deadline, ask = time.monotonic() + seconds, signal.SIGTERM
    pause = 0.001
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, ask)
            deadline, ask = deadline + GRACE_S, signal.SIGKILL
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


if __name__ == "__main__":
    _main()
