"""Traces as JSON: what was traced once is planned without torch, at any sequence length.

A trace is kept at a few sequence lengths. Quantities per token are linear in the length between
two of them, because the lengths include every window of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from shardwise.spec.catalogue import traced
from shardwise.units.stage import POLICIES, Kept, Moment, Stage
from shardwise.units.unit import ModelUnits, Parameter, Unit

FORMAT = 1
_MOMENTS = ("forward", "forward_unsaved", "backward")
# Fields that tables hold in a form of their own, or that a trace never sets.
_PARTS = ("parts", "of_experts", "before_bytes", "after_bytes")
_OWN_FORM = frozenset((*_MOMENTS, *_PARTS, "kept", "exchanges", "compiled", "linear_dtype"))
_PLAIN = tuple(f for f in fields(Stage) if f.name not in _OWN_FORM)


def trace_table(traces: Sequence[ModelUnits]) -> dict[str, Any]:
    """One model traced at several sequence lengths, as JSON."""
    # Blocks that differ at one length, as windows make them, are of different kinds.
    kinds: dict[tuple[int, ...], int] = {}
    order = [
        kinds.setdefault(tuple(map(id, blocks)), len(kinds))
        for blocks in zip(*(units.blocks for units in traces), strict=True)
    ]
    firsts = [order.index(kind) for kind in range(len(kinds))]
    last = traces[-1]
    return {
        "format": FORMAT,
        "name": last.name,
        "tied": last.tied,
        "embedding_gradient_elements": last.embedding_gradient_elements,
        "blocks": _run_lengths(order),
        "parameters": [_parameters(last.blocks[first].parameters) for first in firsts],
        "root": _parameters(last.root.parameters),
        "at": [
            {
                "seq_len": units.seq_len,
                "boundary_bytes": units.boundary_bytes,
                "stages": [_stage(units.blocks[first].stage) for first in firsts],
                "root": _stage(units.root.stage),
            }
            for units in traces
        ],
    }


def units_from(table: Mapping[str, Any], seq_len: int) -> ModelUnits | None:
    """The units of a kept trace at a sequence length; None if it is outside those kept."""
    at = _between(table["at"], seq_len)
    if table["format"] != FORMAT or at is None:
        return None
    kinds = [
        Unit(name="block", parameters=_read_parameters(own), stage=_read_stage(stage))
        for own, stage in zip(table["parameters"], at["stages"], strict=True)
    ]
    root = Unit(
        name="root", parameters=_read_parameters(table["root"]), stage=_read_stage(at["root"])
    )
    return ModelUnits(
        name=table["name"],
        seq_len=seq_len,
        root=root,
        blocks=tuple(kinds[kind] for kind, count in table["blocks"] for _ in range(count)),
        tied=table["tied"],
        boundary_bytes=at["boundary_bytes"],
        embedding_gradient_elements=table["embedding_gradient_elements"],
    )


def kept_units(name: str, seq_len: int, variant: str) -> ModelUnits | None:
    """The units of a model of the catalogue; None for a length or variant that is not kept."""
    table = traced.trace(name)["traces"].get(variant)
    return units_from(table, seq_len) if table else None


def kept_lengths(name: str) -> tuple[int, int]:
    """The shortest and the longest sequence, in tokens, that a kept trace covers."""
    at = next(iter(traced.trace(name)["traces"].values()))["at"]
    return at[0]["seq_len"], at[-1]["seq_len"]


def kept_parameters(name: str) -> int:
    """The number of parameters of a model of the catalogue with a kept trace."""
    return longest_units(name).parameters


def longest_units(name: str) -> ModelUnits:
    """The units of a model of the catalogue at the longest sequence of its kept trace."""
    table = next(iter(traced.trace(name)["traces"].values()))
    units = units_from(table, table["at"][-1]["seq_len"])
    assert units is not None
    return units


def without_superfluous(table: dict[str, Any], tolerance: float = 1e-9) -> dict[str, Any]:
    """The trace without the lengths that its neighbours give as exactly."""
    at = list(table["at"])
    index = 1
    while index < len(at) - 1:
        guess = _mixed(at[index - 1], at[index + 1], at[index]["seq_len"])
        if _close(guess, at[index], tolerance):
            del at[index]
        else:
            index += 1
    return {**table, "at": at}


def _between(at: Sequence[dict[str, Any]], seq_len: int) -> dict[str, Any] | None:
    """The kept record at a length, or a mixture of its two neighbours; None outside of them."""
    for lower, upper in zip(at, [*at[1:], None], strict=True):
        if lower["seq_len"] == seq_len:
            return lower
        if upper is not None and lower["seq_len"] < seq_len < upper["seq_len"]:
            return dict(_mixed(lower, upper, seq_len))
    return None


def _mixed(lower: Any, upper: Any, seq_len: int) -> Any:
    """A record at `seq_len` from those at two lengths: each number on the line between them."""
    share = (seq_len - lower["seq_len"]) / (upper["seq_len"] - lower["seq_len"])

    def mix(low: Any, high: Any) -> Any:
        if isinstance(low, dict) and isinstance(high, dict):
            return {key: mix(low.get(key, 0), high.get(key, 0)) for key in {**low, **high}}
        if isinstance(low, list) and isinstance(high, list):
            # Lists of moments that differ in length: the longer sequence's hold more.
            if len(low) != len(high):
                return high
            return [mix(a, b) for a, b in zip(low, high, strict=True)]
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            value = low + (high - low) * share
            return round(value) if isinstance(low, int) and isinstance(high, int) else value
        return high

    return mix(lower, upper)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two records have the same shape and the same numbers, up to a relative error."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _close(one[key], other[key], tolerance) for key in one
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _close(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= tolerance * max(abs(one), abs(other), 1.0)
    return bool(one == other)


def _stage(stage: Stage) -> dict[str, Any]:
    """A stage as JSON: what differs from a stage without computation."""
    table: dict[str, Any] = {
        f.name: getattr(stage, f.name)
        for f in _PLAIN
        if f.default is MISSING or getattr(stage, f.name) != f.default
    }
    if any(any(kept) for kept in stage.kept.values()):
        table["kept"] = [list(stage.kept[policy]) for policy in POLICIES]
    for name in _MOMENTS:
        table[name] = [_trimmed(moment) for moment in getattr(stage, name)]
    return table


def _read_stage(table: Mapping[str, Any]) -> Stage:
    """The stage of a table of `_stage`."""
    values = {f.name: table[f.name] for f in _PLAIN if f.name in table}
    if "kept" in table:
        kept = zip(POLICIES, table["kept"], strict=True)
        values["kept"] = {policy: Kept(*numbers) for policy, numbers in kept}
    for name in _MOMENTS:
        values[name] = tuple(Moment(*numbers) for numbers in table[name])
    return Stage(**values)


def _trimmed(moment: Moment) -> list[Any]:
    """The numbers of a moment, without those of a copy that it does not have."""
    return list(moment) if moment.copied is not None else list(moment[:3])


def _parameters(parameters: Iterable[Parameter]) -> list[list[Any]]:
    """Parameters as [name, shape, whether after the blocks, whether trained]."""
    return [[p.name, list(p.shape), int(p.after_blocks), int(p.trainable)] for p in parameters]


def _read_parameters(table: Iterable[Sequence[Any]]) -> tuple[Parameter, ...]:
    """The parameters of a table of `_parameters`."""
    return tuple(
        Parameter(
            name=name, shape=tuple(shape), after_blocks=bool(after), trainable=bool(trainable)
        )
        for name, shape, after, trainable in table
    )


def _run_lengths(values: Iterable[int]) -> list[list[int]]:
    """Consecutive equal values as [value, how often]."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
