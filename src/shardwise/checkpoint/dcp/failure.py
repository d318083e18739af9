"""Errors and warnings of torch's distributed checkpoint, as one sentence or none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


class RankError(Exception):
    """An error of a rank as text; the errors of stores cannot always be sent to other ranks."""


@contextmanager
def as_rank_error() -> Iterator[None]:
    """Convert any exception into a RankError, which can be sent to every rank."""
    try:
        yield
    except Exception as error:
        raise RankError(_words(error)) from error


def sentence_of(error: BaseException) -> str:
    """The first cause and its rank; torch collects one exception per rank."""
    if not isinstance(error, CheckpointException):
        return _words(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {_words(cause)}"


def _words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]


def ignore_single_process_warning() -> None:
    """Hide torch's warning that a single process saves or loads without torch.distributed.

    The filter stays: `warnings.catch_warnings` is not safe in the threads that save.
    """
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
