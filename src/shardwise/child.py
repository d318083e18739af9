"""Start processes of Python that import nothing from the folder they are started in.

A folder that came with a model or from a repository may hold a `typer.py`; Python puts the working
directory before its own libraries where a module is started with `-m` or `-c`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def protect_children() -> None:
    """Every Python that this process starts, libraries such as torch included, is protected.

    Who needs a child of his own to import from its folder sets PYTHONSAFEPATH to nothing.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")


def python_command(*words: str) -> list[str]:
    """The command of a protected interpreter with these arguments."""
    return [sys.executable, "-P", *words]


def start_python(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a protected interpreter; `options` are those of Popen."""
    return subprocess.Popen(python_command(*words), **options)
