"""Units small enough to price by hand."""

from __future__ import annotations

from typing import Any

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import Memory, predict_memory
from shardwise.predict.traffic import predict_traffic
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.strategy import Strategy, parse_strategy
from shardwise.units.unit import ModelUnits, Parameter, Unit


def bare_units(blocks: int, rows: int = 64, columns: int = 16, root_rows: int = 96) -> ModelUnits:
    """Parameters only: `blocks` equal units and a root, nothing computed."""
    block = Unit(name="block", parameters=(Parameter(name="w", shape=(rows, columns)),))
    root = Unit(name="root", parameters=(Parameter(name="e", shape=(root_rows, columns)),))
    return ModelUnits(name="toy", seq_len=1, root=root, blocks=(block,) * blocks)


def resolve(text: str, devices: int, node_size: int | None = None, /, **settings: Any) -> Strategy:
    strategy = Strategy.read({**parse_strategy(text), **settings})
    return strategy.resolve(devices, node_size or devices)


def traffic(units: ModelUnits, strategy: Strategy) -> dict[tuple[str, str], tuple[int, int]]:
    """(op, group) → (calls, bytes)."""
    found = predict_traffic(units, Configurations.of([strategy]))
    return {(c.op, c.group): (int(c.calls[0]), int(c.bytes[0])) for c in found}


def memory(units: ModelUnits, strategy: Strategy, optimizer: Optimizer = "adamw") -> Memory:
    return predict_memory(units, Configurations.of([strategy]), optimizer)
