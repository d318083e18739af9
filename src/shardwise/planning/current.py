"""The strategy of an existing configuration file, to compare a plan with."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.read_file import read_toml
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy, parse_strategy
from shardwise.stacks.read.imports import import_file, imported_strategy


def current_strategy(path: Path, described: RunSpec) -> Strategy:
    """Read the strategy of a run.toml or another stack's file, resolved for the described run."""
    devices = described.cluster.devices
    if path.suffix == ".toml":
        section = read_toml(path, "current").get("strategy")
        if not isinstance(section, (str, dict)):
            raise SpecError(f"current: {path} has no [strategy]; give a run.toml that has one")
        fields = parse_strategy(section) if isinstance(section, str) else section
    else:
        fields = imported_strategy(import_file(path), devices)
    strategy = Strategy.read(fields, where="current")
    # Degrees of the file are valid only for the file's own number of devices.
    if strategy.replicate is not None and strategy.devices != devices:
        strategy = strategy.unplaced()
    return described._replace(strategy=strategy).resolved().strategy
