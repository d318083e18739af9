"""Tell file system errors caused by a wrong name from errors that may be temporary."""

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
    """Whether an error is caused by the path; others, such as EIO and ESTALE, may be temporary."""
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return isinstance(error, _WRONG_NAMES) or too_long
