"""`shardwise catalog`: models, devices and instances by name, measured kernels, accuracy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    output_format,
    print_json,
    print_table,
)


class Section(StrEnum):
    """The parts of the catalogue."""

    models = "models"
    devices = "devices"
    instances = "instances"
    accuracy = "accuracy"
    kernels = "kernels"
    software = "software"


_Section = Annotated[
    str,
    typer.Argument(
        help="models, devices, instances, accuracy, kernels or software.",
        autocompletion=lambda: list(Section),
    ),
]
_Name = Annotated[str | None, typer.Argument(help="One entry: all its figures and their sources.")]
_Device = Annotated[str | None, typer.Option(help="With accuracy or kernels: of this device only.")]


def catalog(
    section: _Section = Section.models.value,
    name: _Name = None,
    device: _Device = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
) -> None:
    """List the models, devices and instances that can be named, every figure with its source.

    `instances` lists machines that providers rent, their network and on-demand prices.
    `accuracy` lists errors of predictions by device, and how many independent runs and sources
    they come from. `kernels` lists measured kernels (attention, matrix products, element-wise
    operations, collectives): the coefficients of simple forms, fitted to published measurements.
    `software` lists which of them a stack calls.
    """
    from shardwise.report.catalog import (
        entries,
        entry_table,
        print_entry,
        print_section,
        section_table,
    )
    from shardwise.spec.record import SpecError

    form = output_format(as_json, as_csv, as_markdown)
    listed = _section(section)
    if listed in (Section.accuracy, Section.kernels):
        shown = _accuracy if listed == Section.accuracy else _kernels
        shown(_one_device(name, device), form)
        return
    if device is not None:
        raise SpecError(f"--device: is for accuracy and kernels; 'catalog {listed} NAME' shows one")
    found = entries(listed, name)
    if form is Format.json:
        print_json(found)
    elif form is not Format.screen:
        table = section_table(listed, found) if name is None else entry_table(found[0])
        print_table(table, form)
    elif name is not None:
        print_entry(found[0])
    else:
        print_section(listed, found)


def _accuracy(device: str | None, form: Format) -> None:
    """Print prediction errors of all devices or of one."""
    from shardwise.report.accuracy import accuracy_entries, accuracy_table, print_accuracy

    found = accuracy_entries(device)
    if form is Format.json:
        print_json(found)
    elif form is Format.screen:
        print_accuracy(found, device)
    else:
        print_table(accuracy_table(found), form)


def _kernels(device: str | None, form: Format) -> None:
    """Print measured kernels of all devices or of one."""
    from shardwise.report.kernels import kernel_entries, kernel_table, print_kernels

    if form is Format.json:
        print_json(kernel_entries(device))
    elif form is Format.screen:
        print_kernels(device)
    else:
        print_table(kernel_table(device), form)


def _one_device(name: str | None, device: str | None) -> str | None:
    """The device given as an argument or as `--device`; SpecError if they differ."""
    from shardwise.spec.record import SpecError

    if name is not None and device is not None and name != device:
        raise SpecError(f"--device: {device[:60]!r} and {name[:60]!r} are two devices")
    return name if device is None else device


def _section(text: str) -> str:
    """The text, if it names a section of the catalogue; else SpecError."""
    from shardwise.spec.record import SpecError

    if text not in list(Section):
        raise SpecError(
            f"catalog: {text[:60]!r} is not one of {', '.join(Section)}; to see one entry write "
            "'shardwise catalog devices H100-SXM'"
        )
    return text
