"""A worker process of `shardwise serve`: it answers one question after the other.

It reads tasks from standard input and writes replies to standard output. Each message has its
length in front. The process exits when its input ends, even during a task, so it never outlives
the server.
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

# Bytes of the length in front of a message.
LENGTH = 8
# A worker sends this when it has a task. If it is killed before, another worker gets the task.
BEGUN = b"begun"


class Reply(NamedTuple):
    """An HTTP status and the text of the response; for an error, one sentence."""

    status: int
    text: str


def framed(message: bytes) -> bytes:
    """A message with its length in front."""
    return len(message).to_bytes(LENGTH, "big") + message


def reply_to(task: dict[str, Any]) -> Reply:
    """Do a task: answer its "question", or write the report about its "run".

    An unexpected error becomes a reply with status 500.
    """
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
    """Status 200 with the answer as JSON; 422 if the question is invalid."""
    from shardwise.web.answer import answer
    from shardwise.web.question import read_question

    try:
        read_question(question)
    except SpecError:
        return Reply(422, answer(question))
    return Reply(200, answer(question))


def _report(folder: Path, run: str) -> Reply:
    """Status 200 with the HTML report about a run; 404 or 422 if it cannot be read."""
    from shardwise.web.local_runs import page_of

    try:
        page = page_of(folder, run)
    except SpecError as error:
        return Reply(422, error.problems[0])
    except OSError as error:
        return Reply(404, f"{error.filename or run}: {error.strerror}")
    return Reply(404, "There is no such run.") if page is None else Reply(200, page)


def main() -> None:
    """Reply to JSON tasks on standard input until it ends: BEGUN, then the reply.

    Every message has its length in front. All other output goes to standard error.
    """
    import json

    # Replies keep the real standard output; everything else printed goes to standard error.
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
    """Put each message of `stream` into `tasks`; exit the process when the stream ends."""
    while header := stream.read(LENGTH):
        tasks.put(stream.read(int.from_bytes(header, "big")))
    os._exit(0)


if __name__ == "__main__":
    main()
