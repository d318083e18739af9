"""`python -m shardwise.examples` writes the examples of the documentation to ./examples."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shardwise.spec.foreign_text import echo

NAME = "examples"


def examples_folder() -> Path:
    """Where the examples are: inside the wheel, or at the root of a checkout."""
    here = Path(__file__).resolve()
    inside = here.parent / "_examples"
    return inside if inside.is_dir() else here.parents[2] / NAME


def main() -> None:
    """Copy the examples into the current folder, unless there are some."""
    try:
        shutil.copytree(examples_folder(), NAME)
    except FileExistsError:
        sys.exit(f"error: the folder {NAME} exists; remove it, or use what is there")
    echo(f"Written to {NAME}")


if __name__ == "__main__":
    main()
