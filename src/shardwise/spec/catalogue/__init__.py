"""The catalogue of model shapes, devices and coefficients, each figure with its source."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.spec.catalogue import traced
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.instance import Instance, find_instance, instances
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.suggest import begins_or_nearly
from shardwise.spec.tables import entry, sections

# The source of a memory size that was read from this machine. Such a size is not written to files,
# which may be for another machine.
HERE = "this machine"


def model_names() -> list[str]:
    """The names of all model presets."""
    return list(sections("models.toml"))


def all_model_names() -> list[str]:
    """The names of all models: presets of sizes, then those with a kept trace."""
    return [*model_names(), *traced.names()]


@cache
def hub_presets() -> Mapping[str, str]:
    """The presets by the lower-case names under which a hub has models of their sizes."""
    return {hub.lower(): name for name in model_names() for hub in hub_names(name)}


def hub_names(preset: str) -> list[str]:
    """The names under which a hub has a model of the catalogue; may be empty."""
    if preset in traced.names():
        return traced.hub_names(preset)
    names: list[str] = entry("models.toml", preset).get("hub", [])
    return names


def model(name: str) -> ModelSpec:
    """The model preset called `name`, or so on a hub (case does not matter); else SpecError."""
    folded = {known.lower(): known for known in model_names()}
    known = hub_presets().get(name.lower()) if "/" in name else folded.get(name.lower())
    if known is None:
        hint = did_you_mean(name, all_model_names()) or (
            "; give a folder with its config.json, or a name of 'shardwise catalog models'"
        )
        raise SpecError(f"model: unknown model {name[:60]!r}{hint}")
    fields = {key: value for key, value in entry("models.toml", known).items() if key != "hub"}
    return ModelSpec.read({"name": known, **fields}, where=f"models.toml: {known}")


@cache
def _device(name: str) -> DeviceSpec:
    fields = entry("devices.toml", name)
    return DeviceSpec.read({"name": name, **fields}, where=f"devices.toml: {name}")


class _Devices(Mapping[str, DeviceSpec]):
    """All devices by name; each is read from the catalogue on first access."""

    def __getitem__(self, name: str) -> DeviceSpec:
        if name not in sections("devices.toml"):
            raise KeyError(name)
        return _device(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sections("devices.toml"))

    def __len__(self) -> int:
        return len(sections("devices.toml"))


_DEVICES = _Devices()


def host_memory(processes: int) -> int:
    """This machine's RAM divided by `processes`, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


def this_machine(processes: int) -> DeviceSpec:
    """The generic CPU with the memory of this machine divided among `processes`."""
    return _device("CPU").but(memory=host_memory(processes))


def with_memory_here(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster, with this machine's memory per process if its devices are generic CPUs.

    Other clusters are returned unchanged.
    """
    device = cluster.device
    if not device.is_cpu or device != _device("CPU") or cluster.parts is not None:
        return cluster
    try:
        memory = host_memory(cluster.devices_per_node)
    except (AttributeError, OSError, ValueError):  # not on Windows, not in a browser
        return cluster
    return cluster.but(device=device.but(memory=memory, source={**device.source, "memory": HERE}))


def devices() -> Mapping[str, DeviceSpec]:
    """All devices of the catalogue by name."""
    return _DEVICES


def find_device(name: str) -> DeviceSpec:
    """The device called `name` (case does not matter); SpecError if there is none."""
    folded = {known.lower(): known for known in _DEVICES}
    if name.lower() not in folded:
        hint = did_you_mean(name, _DEVICES) or "; see 'shardwise catalog devices'"
        raise SpecError(f"unknown device {name[:60]!r}{hint}")
    return _DEVICES[folded[name.lower()]]


def find_hardware(name: str) -> DeviceSpec | Instance:
    """The device or instance called `name` (case does not matter); SpecError if there is none."""
    found = find_instance(name)
    if found is not None:
        return found
    try:
        return find_device(name)
    except SpecError:
        near = begins_or_nearly(name, instances())
        hint = did_you_mean(name, near or _DEVICES) or did_you_mean(name, instances())
        if not hint:
            hint = "; see 'shardwise catalog devices' and 'shardwise catalog instances'"
        raise SpecError(f"unknown device or instance {name[:60]!r}{hint}") from None


@cache
def step_coefficients() -> dict[str, float]:
    """Coefficients fitted to runs, by name; those of one stack only as "stack.name"."""
    found = _values(entry("coefficients.toml", "step"))
    for section in sections("coefficients.toml"):
        stack = section.removeprefix("stack-")
        if stack != section:
            own = _values(entry("coefficients.toml", section))
            found |= {f"{stack}.{name}": value for name, value in own.items()}
    return found


def _values(section: Mapping[str, Any]) -> dict[str, float]:
    """The values of a section of fitted coefficients, by name."""
    return {name: float(fitted["value"]) for name, fitted in section.items()}


def device_coefficients(device: str) -> dict[str, float] | None:
    """Coefficients fitted to contributed runs on one device; None if there are none."""
    name = f"device-{device}"
    if name not in sections("coefficients.toml"):
        return None
    return _values(entry("coefficients.toml", name))


def accuracy() -> list[dict[str, Any]]:
    """Errors of predictions on runs that nothing was fitted to, by device and kind of evidence."""
    text = Path(__file__).with_name("accuracy.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["evidence"]
    return found


def figure(name: str) -> float:
    """The value of a constant in coefficients.toml, such as a fitted or assumed figure."""
    return float(entry("coefficients.toml", name)["value"])


def coefficient(name: str) -> tuple[float, float]:
    """The interval (low, high) of a figure in coefficients.toml."""
    interval = entry("coefficients.toml", name)
    return float(interval["low"]), float(interval["high"])
