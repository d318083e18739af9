from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import pytest

from shardwise.spec import catalogue
from shardwise.spec.record import SpecError

FIGURES = ("memory", "memory_bandwidth", "link_bandwidth", "peak")


def test_it_is_large_enough() -> None:
    families = {catalogue.model(name).family for name in catalogue.model_names()}
    assert len(catalogue.model_names()) >= 25
    assert len(catalogue.devices()) >= 14
    assert len(families) >= 10


@pytest.mark.parametrize("name", catalogue.model_names())
def test_every_model_is_valid_and_has_a_source(name: str) -> None:
    assert catalogue.model(name).source
    assert catalogue.model(name.upper()) == catalogue.model(name)


@pytest.mark.parametrize("name", list(catalogue.devices()))
def test_every_figure_of_a_device_has_a_source(name: str) -> None:
    device = catalogue.devices()[name]
    for figure in FIGURES:
        assert device.source.get(figure), f"{name}.{figure} has no source"
    if device.usable_memory is not None:
        assert device.source.get("usable_memory")
        assert 0.9 < device.usable_memory / device.memory <= 1


def test_traps_of_the_data_sheets() -> None:
    devices = catalogue.devices()
    # Dense, not sparse; one direction, not both (facts collected from the vendors' sheets).
    assert devices["H100-SXM"].peak_flops("bf16") == 989.5e12
    assert devices["H100-SXM"].link_bandwidth == 450e9
    assert devices["A100-80GB"].peak_flops("bf16") == 312e12
    assert devices["A100-80GB"].link_bandwidth == 300e9
    assert devices["V100-SXM2-32GB"].peak_flops("bf16") is None


def test_an_unknown_model_gets_a_suggestion() -> None:
    with pytest.raises(SpecError, match="did you mean 'llama-3-8b'"):
        catalogue.model("lama-3-8b")
    with pytest.raises(SpecError, match="shardwise catalog models"):
        catalogue.model("xyzzy")


def test_coefficients_have_unit_interval_and_source() -> None:
    text = files("shardwise.spec.catalogue").joinpath("coefficients.toml").read_text()
    entries: dict[str, Any] = {}
    for name, entry in tomllib.loads(text).items():
        # Fitted coefficients stand in a table for each family of devices.
        nested = all(isinstance(value, dict) for value in entry.values())
        entries |= {f"{name}.{k}": v for k, v in entry.items()} if nested else {name: entry}
    assert any(name.startswith("step.") for name in entries)
    for name, entry in entries.items():
        assert entry["low"] <= entry.get("value", entry["low"]) <= entry["high"], name
        assert entry["low"] <= entry["high"], name
        assert entry["unit"]
        assert entry["source"]
