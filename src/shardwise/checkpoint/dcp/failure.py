"""What went wrong in a checkpoint of many ranks, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


class RankError(Exception):
    """What went wrong on a rank, in words: errors of stores cannot always travel to others."""


@contextmanager
def plainly() -> Iterator[None]:
    """Whatever is raised becomes a RankError, which every rank can be told."""
    try:
        yield
    except Exception as error:
        raise RankError(_words(error)) from error


def sentence_of(error: BaseException) -> str:
    """The first cause and the rank it happened on; torch wraps one for each rank."""
    if not isinstance(error, CheckpointException):
        return _words(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {_words(cause)}"


def _words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]
