"""Packing of short sequences in other stacks, as far as `[data]` can say it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.stacks.outcomes import UNSAID, Outcome
from shardwise.stacks.read.imported import Reading, flag


def set_packing(reading: Reading, table: Mapping[str, object], key: str) -> None:
    """`data.packing`, where a run takes it without the data's own settings."""
    if table.get(key) is None:
        return
    packed = flag(table, key, otherwise=False)
    try:
        DataSettings.read({"packing": packed})
    except SpecError:
        beside = "set data.packing beside the path of your data"
        reading.record(Outcome("lost", key, packed, why=beside, naming="assignment"))
        return
    reading.data["packing"] = packed
    reading.given(key, {"data.packing": UNSAID}, packed, naming="assignment")
