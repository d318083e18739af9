"""Run a function on the ranks of the trainer's own launcher, and read what rank 0 yields.

The launcher is a separate process: if a rank dies or hangs, only that process fails. Rank 0 writes
each value at once, so that a check that is stopped keeps the values so far.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.launch.child import start_python
from shardwise.launch.environment import FOLDER, is_worker
from shardwise.launch.launcher import kill_tree, launch
from shardwise.trials.accept.line import CheckFailedError

# Environment variable with the path of the task's file, for the launcher and the ranks.
TASK = "SHARDWISE_ACCEPT_TASK"
_POLL_S = 0.1


class Task(NamedTuple):
    """A generator `module:name`, its argument, and where rank 0 writes what it yields."""

    function: str
    case: Mapping[str, Any]
    processes: int
    values: str


def on_ranks(
    function: str, case: Mapping[str, Any], processes: int, folder: Path, deadline: float
) -> Iterator[Any]:
    """Yield the values of `function(case)` on rank 0; `deadline` is of the monotonic clock.

    Raises CheckFailedError if a process fails, or at the deadline, when all are killed.
    """
    folder.mkdir(parents=True)
    values, task = folder / "values.jsonl", folder / "task.json"
    values.touch()
    task.write_text(json.dumps(Task(function, case, processes, str(values))._asdict()))
    kept = {k: v for k, v in os.environ.items() if k not in (FOLDER, "RANK", "WORLD_SIZE")}
    with (
        (folder / "log.txt").open("w+") as log,
        values.open() as reader,
        start_python(
            *("-m", "shardwise", "doctor"),
            env={**kept, TASK: str(task)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        ) as process,
    ):  # fmt: skip
        try:
            while True:
                ended = process.poll() is not None
                yield from _complete_lines(reader)
                if ended:
                    break
                if time.monotonic() > deadline:
                    raise CheckFailedError("no result before the deadline; processes killed")
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
        log.seek(0)
        if process.returncode:
            raise CheckFailedError(last_words(log.read(), process.returncode))


def last_words(log: str, code: int) -> str:
    """The last error of a log, or its last line, or the exit code."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or "Error: " in line]
    return (errors or lines or [f"exit code {code}"])[-1]


def _complete_lines(reader: Any) -> Iterator[Any]:
    """Yield the JSON values of new complete lines; half a line is left for the next call."""
    while True:
        at = reader.tell()
        line = reader.readline()
        if not line.endswith("\n"):
            reader.seek(at)
            return
        yield json.loads(line)


def work(task: Path) -> int:
    """Launch the ranks of a task, or run the task as one of them; return the exit code."""
    told = Task(**json.loads(task.read_text()))
    if told.processes > 1 and not is_worker(os.environ):
        return launch(["doctor"], told.processes, task.parent, transformers=True)
    module, _, name = told.function.partition(":")
    function: Callable[[Any], Iterator[Any]] = getattr(import_module(module), name)
    with open(told.values, "a", encoding="utf-8") as file:
        for value in function(told.case):
            if os.environ.get("RANK", "0") == "0":
                file.write(json.dumps(value, allow_nan=False) + "\n")
                file.flush()
    return 0
