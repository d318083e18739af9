"""Write files without stopping the training: a full disk costs a line, not the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from io import FileIO
from types import TracebackType

log = logging.getLogger("shardwise")


class BestEffort:
    """A context that suppresses OSError; the first one is reported as "Could not {what}: …".

    `what` is a verb and its object, such as "write a line".
    """

    def __init__(self, what: str, report: Callable[[str], None] = log.warning) -> None:
        self._what, self._report = what, report
        self._reported = False

    def __enter__(self) -> None:
        """Nothing to do: only the end of the context matters."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._reported:
            self._reported = True
            why = error.strerror or error
            self._report(f"Could not {self._what}: {why}. Later failures are not reported")
        return True


def append_line(file: FileIO, line: str) -> None:
    """Append a complete line to a file; if that fails, the file stays as it was."""
    end = file.seek(0, os.SEEK_END)
    left = memoryview(f"{line}\n".encode())
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise
