"""`shardwise examples`: write the examples of the documentation to ./examples."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwise.spec.foreign_text import echo
from shardwise.spec.record import SpecError

NAME = "examples"


def examples_folder() -> Path:
    """The folder of the examples: inside the wheel, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_examples"
    return inside if inside.is_dir() else package.parents[1] / NAME


def examples() -> None:
    """Write the examples of the documentation to ./examples."""
    try:
        shutil.copytree(examples_folder(), NAME)
    except FileExistsError:
        raise SpecError(f"the folder {NAME} exists; remove it, or use what is there") from None
    echo(f"Written to {NAME}")
