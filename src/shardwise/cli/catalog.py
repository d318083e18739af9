"""`shardwise catalog`: what can be named, every figure with its source."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


class Shelf(StrEnum):
    """The parts of the catalogue."""

    models = "models"
    devices = "devices"


def catalog(
    shelf: Annotated[Shelf, typer.Argument(help="models or devices.")] = Shelf.models,
    name: Annotated[
        str | None, typer.Argument(help="One entry, with all its figures and sources.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Models and devices that can be named, with every figure and its source."""
    from shardwise.report.catalog import entries, print_entry, print_shelf

    found = entries(shelf.value, name)
    if as_json:
        print_json(found)
    elif name is not None:
        print_entry(found[0])
    else:
        print_shelf(shelf.value, found)
