"""What every command shares: `--json` and how it prints."""

from __future__ import annotations

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def print_json(value: object) -> None:
    """Print strict JSON: a number that is not a number is a bug, not an output."""
    import json

    typer.echo(json.dumps(value, indent=2, allow_nan=False))
