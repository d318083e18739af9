"""The catalogue: model shapes and devices that can be named, each figure with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.spec.cluster import DeviceSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError, did_you_mean


@cache
def _table(name: str) -> Mapping[str, dict[str, Any]]:
    return tomllib.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))


def model_names() -> list[str]:
    return list(_table("models.toml"))


def model(name: str) -> ModelSpec:
    """The preset called `name` (case does not matter)."""
    table = _table("models.toml")
    folded = {known.lower(): known for known in table}
    known = folded.get(name.lower())
    if known is None:
        hint = did_you_mean(name, table) or "; see 'shardwise catalog models'"
        raise SpecError(f"model: unknown model {name[:60]!r}{hint}")
    return ModelSpec.read({"name": known, **table[known]}, where=f"models.toml: {known}")


@cache
def devices() -> Mapping[str, DeviceSpec]:
    """Every device by name."""
    table = _table("devices.toml")
    return {
        name: DeviceSpec.read({"name": name, **fields}, where=f"devices.toml: {name}")
        for name, fields in table.items()
    }


def coefficient(name: str) -> tuple[float, float]:
    """The interval of a figure that is neither arithmetic nor data sheet."""
    entry = _table("coefficients.toml")[name]
    return float(entry["low"]), float(entry["high"])
