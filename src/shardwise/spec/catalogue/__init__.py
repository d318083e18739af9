"""The catalogue: model shapes and devices that can be named, each figure with its source."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError, did_you_mean

# The source of memory that was read where the command runs. It is not written to files, which may
# be for another machine.
HERE = "this machine"
_HEADER = re.compile(r'^\["?([^"\].]+(?:\.[0-9][^"\].]*)*)"?(?:\.[a-z_]+)?\]$', re.MULTILINE)


@cache
def _sections(file: str) -> Mapping[str, str]:
    """The text of each entry, by name. Parsing one entry is a hundred times faster than all."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    headers = list(_HEADER.finditer(text))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        end = following.start() if following else len(text)
        found[header[1]] = found.get(header[1], "") + text[header.start() : end]
    return found


@cache
def _entry(file: str, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = tomllib.loads(_sections(file)[name])[name]
    return parsed


def model_names() -> list[str]:
    return list(_sections("models.toml"))


def model(name: str) -> ModelSpec:
    """The preset called `name` (case does not matter)."""
    folded = {known.lower(): known for known in model_names()}
    known = folded.get(name.lower())
    if known is None:
        hint = did_you_mean(name, model_names()) or (
            "; give a folder with its config.json, or a name of 'shardwise catalog models'"
        )
        raise SpecError(f"model: unknown model {name[:60]!r}{hint}")
    entry = _entry("models.toml", known)
    return ModelSpec.read({"name": known, **entry}, where=f"models.toml: {known}")


@cache
def _device(name: str) -> DeviceSpec:
    entry = _entry("devices.toml", name)
    return DeviceSpec.read({"name": name, **entry}, where=f"devices.toml: {name}")


class _Devices(Mapping[str, DeviceSpec]):
    """Devices by name, each read when it is asked for."""

    def __getitem__(self, name: str) -> DeviceSpec:
        if name not in _sections("devices.toml"):
            raise KeyError(name)
        return _device(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_sections("devices.toml"))

    def __len__(self) -> int:
        return len(_sections("devices.toml"))


_DEVICES = _Devices()


def host_memory(processes: int) -> int:
    """This machine's RAM divided by `processes`, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


def this_machine(processes: int) -> DeviceSpec:
    """The generic CPU with the memory of this machine divided among `processes`."""
    return _device("CPU").but(memory=host_memory(processes))


def with_memory_here(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster; generic CPUs have this machine's memory, which their processes share."""
    device = cluster.device
    if not device.is_cpu or device != _device("CPU"):
        return cluster
    try:
        memory = host_memory(cluster.devices_per_node)
    except (AttributeError, OSError, ValueError):  # not on Windows, not in a browser
        return cluster
    return cluster.but(device=device.but(memory=memory, source={**device.source, "memory": HERE}))


def devices() -> Mapping[str, DeviceSpec]:
    """Every device by name."""
    return _DEVICES


def find_device(name: str) -> DeviceSpec:
    """The device called `name` (case does not matter)."""
    folded = {known.lower(): known for known in _DEVICES}
    if name.lower() not in folded:
        hint = did_you_mean(name, _DEVICES) or "; see 'shardwise catalog devices'"
        raise SpecError(f"unknown device {name[:60]!r}{hint}")
    return _DEVICES[folded[name.lower()]]


def software_names() -> list[str]:
    return list(_sections("software.toml"))


def software_entry(name: str) -> dict[str, Any]:
    """What the catalogue says of a software."""
    return _entry("software.toml", name)


@cache
def step_coefficients() -> dict[str, float]:
    """What was fitted to runs, by name; what is of one stack as "stack.name"."""
    found = _values(_entry("coefficients.toml", "step"))
    for section in _sections("coefficients.toml"):
        stack = section.removeprefix("stack-")
        if stack != section:
            own = _values(_entry("coefficients.toml", section))
            found |= {f"{stack}.{name}": value for name, value in own.items()}
    return found


def _values(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(fitted["value"]) for name, fitted in entry.items()}


def device_coefficients(device: str) -> dict[str, float] | None:
    """Coefficients fitted to contributed runs on one device; None where there are none."""
    name = f"device-{device}"
    if name not in _sections("coefficients.toml"):
        return None
    return _values(_entry("coefficients.toml", name))


def accuracy() -> list[dict[str, Any]]:
    """Errors of predictions on runs that nothing was fitted to, by device and kind of evidence."""
    text = Path(__file__).with_name("accuracy.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["evidence"]
    return found


def figure(name: str) -> float:
    """The value of a figure that is neither arithmetic nor data sheet."""
    return float(_entry("coefficients.toml", name)["value"])


def coefficient(name: str) -> tuple[float, float]:
    """The interval of a figure that is neither arithmetic nor data sheet."""
    entry = _entry("coefficients.toml", name)
    return float(entry["low"]), float(entry["high"])
