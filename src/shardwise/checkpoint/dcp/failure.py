"""Errors and warnings of torch's distributed checkpoint, as one sentence or none."""

from __future__ import annotations

import warnings

from torch.distributed.checkpoint.api import CheckpointException


def cause_of(error: BaseException) -> BaseException:
    """The error itself; torch wraps it, even on one rank."""
    if isinstance(error, CheckpointException):
        error, _ = min(error.failures.items())[1]
    return error


def sentence_of(error: BaseException) -> str:
    """The cause as one sentence."""
    error = cause_of(error)
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]


def ignore_single_process_warning() -> None:
    """Hide torch's warning that a process saves or loads without asking others.

    The filter stays: `warnings.catch_warnings` is not safe in the threads that save.
    """
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
