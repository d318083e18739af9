"""Read whether another stack packs short sequences, as `data.packing`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.stacks.outcomes import ABSENT, Outcome
from shardwise.stacks.read.imported import Reading, boolean


def set_packing(
    reading: Reading, table: Mapping[str, object], key: str, absent: bool | None = None
) -> None:
    """Set `data.packing` from a boolean key, or from the stack's default if it is `absent`.

    Nothing is set without a default, or if the value is known only at run time. If `[data]` is not
    valid with this setting alone, report it as lost.
    """
    if table.get(key) is None:
        if absent is not None and key not in reading.undecided:
            reading.default(key, {"data.packing": absent}, absent)
        return
    packed = boolean(table, key, otherwise=False)
    try:
        DataSettings.read({"packing": packed})
    except SpecError:
        beside = "set data.packing beside the path of your data"
        reading.record(Outcome("lost", key, packed, why=beside, naming="assignment"))
        return
    reading.data["packing"] = packed
    reading.given(key, {"data.packing": ABSENT}, packed, naming="assignment")
