"""What every command shares: `--json` and how it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.spec.record import SpecError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def print_json(value: object) -> None:
    """Print strict JSON: a number that is not a number is a bug, not an output."""
    import json

    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def check_output(path: Path, suffix: str) -> None:
    """Refuse a file that cannot be written, or that something else may live in."""
    if path.name == "-":
        raise SpecError("output: '-' is no file; give one a name")
    if not path.parent.is_dir():
        raise SpecError(f"output: there is no folder {path.parent}")
    if path.is_dir() or (path.exists() and path.suffix != suffix):
        raise SpecError(f"output: {path} exists and is no {suffix} file")
