"""The catalogue as tables."""

from __future__ import annotations

from typing import Any

from shardwise.report.screen import plain_console, plain_table
from shardwise.spec import catalogue
from shardwise.spec.quantity import show_count, show_gib
from shardwise.units.decoder import decoder_units


def entries(shelf: str, name: str | None = None) -> list[dict[str, Any]]:
    """The entries of a shelf as plain data; one of them if `name` is given."""
    return _models(name) if shelf == "models" else _devices(name)


def _models(name: str | None) -> list[dict[str, Any]]:
    specs = [catalogue.model(n) for n in ([name] if name is not None else catalogue.model_names())]
    found = []
    for spec in specs:
        units = decoder_units(spec, min(spec.max_positions, 2048))
        found.append({**spec.model_dump(mode="json", exclude_none=True), "parameters": units.numel})
    return found


def _devices(name: str | None) -> list[dict[str, Any]]:
    chosen = catalogue.devices().values() if name is None else [catalogue.find_device(name)]
    return [device.model_dump(mode="json", exclude_none=True) for device in chosen]


def print_shelf(shelf: str, found: list[dict[str, Any]]) -> None:
    """One line per entry, and how to see the rest."""
    out = plain_console()
    table = plain_table()
    table.add_column("name", no_wrap=True)
    headings = (
        ("parameters", "family", "layers", "hidden", "heads/kv", "vocab")
        if shelf == "models"
        else ("memory", "bf16 dense", "memory bw", "link, one way", "node")
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "family" else "right", no_wrap=True)
    for entry in found:
        table.add_row(*(_model_row(entry) if shelf == "models" else _device_row(entry)))
    out.print(table)
    out.print(f"\nEvery figure and its source: shardwise catalog {shelf} NAME", style="dim")


def _model_row(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        entry["name"],
        show_count(entry["parameters"]),
        entry["family"],
        str(entry["layers"]),
        str(entry["hidden"]),
        f"{entry['heads']}/{entry['kv_heads']}",
        str(entry["vocab"]),
    )


def _device_row(entry: dict[str, Any]) -> tuple[str, ...]:
    device = catalogue.devices()[entry["name"]]
    peak = device.peak_flops("bf16")
    return (
        device.name,
        show_gib(device.memory),
        f"{peak / 1e12:,.1f} TFLOPS" if peak else "none",
        f"{device.memory_bandwidth / 1e9:,.0f} GB/s",
        f"{device.link_bandwidth / 1e9:,.0f} GB/s",
        str(device.node_size),
    )


def print_entry(entry: dict[str, Any]) -> None:
    """Every figure of one entry, with its source."""
    out = plain_console()
    out.print(entry["name"], style="bold")
    sources = entry.get("source", "")
    table = plain_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for key, value in entry.items():
        if key in ("name", "source"):
            continue
        source = sources.get(key, "") if isinstance(sources, dict) else ""
        shown = (
            "\n".join(f"{dtype} {peak}" for dtype, peak in value.items())
            if isinstance(value, dict)
            else f"{value:,}"
            if type(value) is int
            else str(value)
        )
        table.add_row(key.replace("_", " "), shown, source)
    out.print(table)
    if isinstance(sources, str) and sources:
        out.print(f"Source: {sources}", style="dim")
