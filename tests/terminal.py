"""A command on a terminal of its own: what it writes there, and what can be read at its end."""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
from pathlib import Path

from tests.command import COMMAND, PATIENCE_S, environment

_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])")


def on_terminal(*words: str, folder: Path) -> tuple[int, str]:
    """The exit code of a command, and all that its processes wrote, controls included."""
    ours, theirs = pty.openpty()
    variables = environment(TERM="xterm", LINES="24")
    with os.fdopen(ours, "rb", buffering=0) as reader:
        running = subprocess.Popen([*COMMAND, *words], cwd=folder, env=variables,
                                   stdin=theirs, stdout=theirs, stderr=theirs)  # fmt: skip
        os.close(theirs)
        seen = b""
        while data := _read(reader.fileno()):
            seen += data
        return running.wait(PATIENCE_S), seen.decode()


def _read(terminal: int) -> bytes:
    """Some bytes; none when the last process of the terminal has ended."""
    try:
        return os.read(terminal, 65536)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def left_of(written: str) -> list[str]:
    """The lines that a terminal shows after all that was written; it wraps none."""
    lines, row, column, at = [""], 0, 0, 0
    for control in [*_CONTROL.finditer(written), None]:
        text = written[at : control.start() if control else len(written)]
        lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
        column += len(text)
        if control is None:
            break
        at = control.end()
        count, name, character = control.groups()
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif name == "A":
            row = max(0, row - int(count or 1))
        elif name == "K":
            lines[row] = "" if count == "2" else lines[row][:column]
        else:
            assert name in "mhl", control[0]  # colours, and whether the cursor is seen
    return lines
