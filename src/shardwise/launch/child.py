"""Start Python processes that import nothing from their working directory.

A folder that came with a model or from a repository may hold a `typer.py`; Python puts the working
directory before its own libraries when a module is started with `-m` or `-c`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def protect_children() -> None:
    """Make all Python processes started from here import nothing from their working directory.

    This includes those that libraries such as torch start. To let a child import from its folder,
    set PYTHONSAFEPATH to an empty string.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")


def python_command(*words: str) -> list[str]:
    """The command that starts a protected Python interpreter with the arguments `words`."""
    return [sys.executable, "-P", *words]


def start_python(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a protected Python interpreter with the arguments `words`; `options` are for Popen."""
    return subprocess.Popen(python_command(*words), **options)
