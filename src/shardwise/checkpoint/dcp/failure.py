"""Reduce errors of torch's distributed checkpoint to one sentence, and hide a warning."""

from __future__ import annotations

import warnings

from torch.distributed.checkpoint.api import CheckpointException


def cause_of(error: BaseException) -> BaseException:
    """The error inside torch's CheckpointException, of the lowest rank; any other error itself."""
    if isinstance(error, CheckpointException):
        error, _ = min(error.failures.items())[1]
    return error


def sentence_of(error: BaseException) -> str:
    """First line of the message of the cause of an error, at most 400 characters."""
    error = cause_of(error)
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:400]


def ignore_single_process_warning() -> None:
    """Hide torch's warning that a process saves or loads without other ranks.

    The filter stays: `warnings.catch_warnings` is not safe in the threads that save.
    """
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
