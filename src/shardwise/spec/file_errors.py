"""Errors of a file system: which say that a name is wrong, and which may pass."""

from __future__ import annotations

import errno

_WRONG_NAMES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)


def is_wrong_name(error: BaseException) -> bool:
    """Whether another name is the remedy; other errors, such as EIO and ESTALE, may pass."""
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return isinstance(error, _WRONG_NAMES) or too_long
