"""The catalogue of models, devices, instances and software as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.report.screen import paragraph, screen, terminal_table
from shardwise.report.table import Cell, Column, Table
from shardwise.spec import catalogue
from shardwise.spec.catalogue import traced
from shardwise.spec.huggingface import config_table
from shardwise.spec.instance import Instance, find_instance, instances
from shardwise.spec.quantity import show_count, show_gib
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.software import find_software, software_names
from shardwise.units.active import active_parameters
from shardwise.units.decoder import decoder_units
from shardwise.units.kept_trace import longest_units
from shardwise.units.unit import ModelUnits

_MODEL_COLUMNS = (
    Column("name", "name", left=True),
    Column("parameters", "parameters", show_count),
    Column("active", "active", show_count),
    Column("family", "family", left=True),
    Column("layers", "layers"),
    Column("hidden", "hidden"),
    Column("heads", "heads"),
    Column("kv_heads", "KV heads", on_screen=False),
    Column("vocab", "vocab"),
    Column("max_positions", "positions", on_screen=False),
)
_DEVICE_COLUMNS = (
    Column("name", "name", left=True),
    Column("memory_bytes", "memory", show_gib),
    Column("usable_memory_bytes", "usable memory", show_gib, on_screen=False),
    Column("bf16_flops", "bf16 dense", lambda flops: f"{flops / 1e12:,.1f} TFLOPS"),
    Column("memory_bytes_per_s", "memory rate", lambda rate: f"{rate / 1e9:,.0f} GB/s"),
    Column("link", "link", left=True, on_screen=False),
    Column("link_bytes_per_s", "link, one way", lambda rate: f"{rate / 1e9:,.0f} GB/s"),
    Column("node_size", "per node"),
)
_INSTANCE_COLUMNS = (
    Column("name", "name", left=True),
    Column("provider", "provider", left=True, on_screen=False),
    Column("device", "GPUs", left=True),
    Column("gpus", "GPUs per node", on_screen=False),
    Column("network_gbps_per_gpu", "Gbps", lambda rate: f"{rate:,.4g}"),
    Column("usd_per_gpu_hour", "USD/h", lambda price: f"{price:,.2f}"),
    Column("priced", "price of", lambda day: str(day)[:-3]),
)
_SOFTWARE_COLUMNS = (
    Column("name", "name", left=True),
    Column("date", "date", left=True),
    Column("ampere", "Ampere", left=True),
    Column("hopper", "Hopper", left=True),
    Column("blackwell", "Blackwell", left=True),
    Column("head", "head and loss", left=True),
    Column("level", "step time", lambda level: f"{level - 1:+z.0%}"),
)
_OF_ONE_GPU = (
    "Gbps and USD/h are of one GPU: its share of the machine's network, one way, and of its "
    "on-demand price in that month. Prices move: --price sets today's."
)
_ENTRY_COLUMNS = (
    Column("field", "field", left=True),
    Column("value", "value", left=True, wrap=True),
    Column("source", "source", left=True, wrap=True),
)


def entries(section: str, name: str | None = None) -> list[dict[str, Any]]:
    """The entries of a section as JSON objects; only the entry `name` if it is given."""
    return _ENTRIES[section](name)


def _models(name: str | None) -> list[dict[str, Any]]:
    """Presets of models with their parameter counts; only one if `name` is given."""
    if name is not None and (kept := traced.named(name)) is not None:
        return [_traced_model(kept)]
    specs = [catalogue.model(n) for n in ([name] if name is not None else catalogue.model_names())]
    found = []
    for spec in specs:
        units = decoder_units(spec, min(spec.max_positions, 2048))
        fields = spec.model_dump(mode="json", exclude_none=True)
        found.append({**fields, **_counts(units, spec.experts_per_token)})
    return found if name is not None else [*found, *map(_traced_model, traced.names())]


def _counts(units: ModelUnits, experts_per_token: int | None) -> dict[str, int]:
    """The parameters of a model, and of a mixture of experts those that a token uses."""
    counts = {"parameters": units.parameters}
    if experts_per_token is not None:
        counts["active"] = active_parameters(units, experts_per_token)
    return counts


def _traced_model(name: str) -> dict[str, Any]:
    """A model with a kept trace: the sizes that its configuration names, and its parameters."""
    config = config_table(traced.config_file(name))
    values = {**config, **traced.trace(name)["values"]}
    text = values.get("text_config")
    sizes = text if isinstance(text, dict) else values
    shown = {
        "layers": ("num_hidden_layers", "num_layers", "decoder_layers"),
        "hidden": ("hidden_size", "d_model"),
        "heads": ("num_attention_heads", "num_heads", "decoder_attention_heads"),
        "kv_heads": ("num_key_value_heads", "num_attention_heads", "num_heads"),
        "vocab": ("vocab_size",),
        "max_positions": ("max_position_embeddings", "max_target_positions"),
    }
    found = {
        field: next((sizes[key] for key in keys if key in sizes), None)
        for field, keys in shown.items()
    }
    made = traced.trace(name)["made_with"]
    family = str(config["model_type"])
    counts = _counts(longest_units(name), sizes.get("num_experts_per_tok"))
    return {"name": name, "family": family, **found, **counts, "trace": made}


def _devices(name: str | None) -> list[dict[str, Any]]:
    """Devices of the catalogue; only one if `name` is given."""
    chosen = catalogue.devices().values() if name is None else [catalogue.find_device(name)]
    return [device.model_dump(mode="json", exclude_none=True) for device in chosen]


def _instances(name: str | None) -> list[dict[str, Any]]:
    """Instances of providers; only one if `name` is given."""
    chosen = list(instances().values()) if name is None else [_instance(name)]
    return [one.model_dump(mode="json", exclude_defaults=True) for one in chosen]


def _instance(name: str) -> Instance:
    """The instance called `name`; SpecError if there is none."""
    found = find_instance(name)
    if found is None:
        hint = did_you_mean(name, instances()) or "; see 'shardwise catalog instances'"
        raise SpecError(f"unknown instance {name[:60]!r}{hint}")
    return found


def _software(name: str | None) -> list[dict[str, Any]]:
    """Software stacks; `level` is their measured step time over the kernel-based prediction.

    `level` is None for a stack without measured steps. Only one stack if `name` is given.
    """
    fitted = catalogue.step_coefficients()
    found = []
    for one in [name] if name is not None else software_names():
        software = find_software(one)
        level = fitted.get(f"{software.stack}.level")
        found.append({**software.model_dump(mode="json"), "level": level})
    return found


_ENTRIES = {
    "models": _models,
    "devices": _devices,
    "instances": _instances,
    "software": _software,
}


def section_table(section: str, found: list[dict[str, Any]]) -> Table:
    """Table of a section with one row per entry."""
    columns, cells = _ROWS[section]
    table = Table(columns)
    for entry in found:
        table.add(*cells(entry))
    return table


def _model_cells(entry: dict[str, Any]) -> list[Cell]:
    return [Cell(entry.get(column.key)) for column in _MODEL_COLUMNS]


def _device_cells(entry: dict[str, Any]) -> list[Cell]:
    device = catalogue.devices()[entry["name"]]
    peak = device.peak_flops("bf16")
    return [
        Cell(device.name),
        Cell(device.memory),
        Cell(device.usable_memory),
        Cell(None, "none") if peak is None else Cell(peak),
        Cell(device.memory_bandwidth),
        Cell(device.link),
        Cell(device.link_bandwidth),
        Cell(device.node_size),
    ]


def _instance_cells(entry: dict[str, Any]) -> list[Cell]:
    instance = instances()[entry["name"]]
    rate = instance.network_per_gpu
    return [
        Cell(instance.name),
        Cell(instance.provider),
        Cell(instance.device, f"{instance.gpus}x{instance.device}"),
        Cell(instance.gpus),
        Cell(None if rate is None else rate * 8 / 1e9),
        Cell(instance.usd_per_gpu_hour),
        Cell(instance.priced),
    ]


def _software_cells(entry: dict[str, Any]) -> list[Cell]:
    level = entry["level"]
    return [
        *(Cell(entry[key]) for key in ("name", "date")),
        *(Cell(entry["attention"][kind]) for kind in ("ampere", "hopper", "blackwell")),
        Cell(entry["head"]),
        Cell(None, "not measured") if level is None else Cell(level),
    ]


_ROWS: dict[str, tuple[tuple[Column, ...], Callable[[dict[str, Any]], list[Cell]]]] = {
    "models": (_MODEL_COLUMNS, _model_cells),
    "devices": (_DEVICE_COLUMNS, _device_cells),
    "instances": (_INSTANCE_COLUMNS, _instance_cells),
    "software": (_SOFTWARE_COLUMNS, _software_cells),
}


def entry_table(entry: dict[str, Any]) -> Table:
    """Table of every field of one entry with its source; dicts take one row per key."""
    sources = entry.get("source", "")
    table = Table(_ENTRY_COLUMNS)
    for key, value in entry.items():
        if key in ("name", "source"):
            continue
        source = sources.get(key, "") if isinstance(sources, dict) else sources
        named = value if isinstance(value, dict) else {"": value}
        for part, figure in named.items():
            text = f"{figure:,}" if type(figure) is int else str(figure)
            field = f"{key} {part}".strip()
            # The screen shows the source of several peaks once, with the first peak.
            shown = source if part in ("", next(iter(named))) else ""
            table.add(
                Cell(field, field.replace("_", " ")),
                Cell(figure, text),
                Cell(source, shown, style="dim"),
            )
    return table


def print_section(section: str, found: list[dict[str, Any]]) -> None:
    """Print a section with one line per entry, and how to see one entry in full."""
    out = screen()
    out.print(terminal_table(section_table(section, found), gap=1))
    if section == "instances":
        out.print()
        paragraph(out, _OF_ONE_GPU, "dim")
    out.print(f"\nEvery figure and its source: shardwise catalog {section} NAME", style="dim")


def print_entry(entry: dict[str, Any]) -> None:
    """Print every field of one entry, with its source."""
    out = screen()
    out.print(entry["name"], style="bold")
    sources = entry.get("source", "")
    table = entry_table(entry if isinstance(sources, dict) else {**entry, "source": ""})
    out.print(terminal_table(table))
    if isinstance(sources, str) and sources:
        out.print(f"Source of all figures: {sources}", style="dim")
