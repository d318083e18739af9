"""A worker of `shardwise serve`: a process that answers one question after the other.

It reads tasks from its standard input and writes replies to its standard output, each with its
length before it. It ends when its input does, even while it works: so it never outlives the server,
however that ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

from shardwise.spec.foreign_text import echo_traceback
from shardwise.spec.record import SpecError

# Bytes of the length before a message.
LENGTH = 8
# What a worker says when it has a task. Killed before that, it costs nobody an answer.
BEGUN = b"begun"


class Reply(NamedTuple):
    """A status of HTTP, and the text that goes with it: of an error, its sentence."""

    status: int
    text: str


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return len(message).to_bytes(LENGTH, "big") + message


def reply_to(task: dict[str, Any]) -> Reply:
    """Answer a question, or write the report about a run."""
    try:
        if "question" in task:
            return _answer(task["question"])
        return _report(Path(task["folder"]), task["run"])
    except Exception as error:
        if os.environ.get("SHARDWISE_DEBUG") not in (None, "", "0"):
            echo_traceback(error)
        what = "question" if "question" in task else "run"
        kind = type(error).__name__
        return Reply(500, f"The planner failed on this {what}: {kind}. This is a bug; report it.")


def _answer(question: str) -> Reply:
    from shardwise.web.answer import answer
    from shardwise.web.question import read_question

    try:
        read_question(question)
    except SpecError:
        return Reply(422, answer(question))
    return Reply(200, answer(question))


def _report(folder: Path, run: str) -> Reply:
    from shardwise.web.local_runs import page_of

    try:
        page = page_of(folder, run)
    except SpecError as error:
        return Reply(422, error.problems[0])
    except OSError as error:
        return Reply(404, f"{error.filename or run}: {error.strerror}")
    return Reply(404, "There is no such run.") if page is None else Reply(200, page)


def main() -> None:
    """Reply to tasks until there are no more."""
    import json

    # Whatever else is printed here must not get between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(sys.stdin.buffer, tasks), daemon=True).start()
    while True:
        task = json.loads(tasks.get())
        replies.write(framed(BEGUN))
        replies.flush()
        reply = reply_to(task)
        replies.write(framed(json.dumps(reply).encode()))
        replies.flush()


def _read(stream: BinaryIO, tasks: SimpleQueue[bytes]) -> None:
    while header := stream.read(LENGTH):
        tasks.put(stream.read(int.from_bytes(header, "big")))
    os._exit(0)


if __name__ == "__main__":
    main()
