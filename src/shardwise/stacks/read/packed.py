"""Packing of short sequences in other stacks, as far as `[data]` can say it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.stacks.read.imported import Reading, flag


def set_packing(reading: Reading, table: Mapping[str, object], key: str) -> None:
    """`data.packing`, where a run has such a setting and takes it without the data's own."""
    if table.get(key) is None:
        return
    packed = flag(table, key, otherwise=False)
    said = f"{key} = {str(packed).lower()}"
    if "packing" in DataSettings.model_fields:
        try:
            DataSettings.read({"packing": packed})
        except SpecError:
            reading.drop(f"{said}: set data.packing beside the path of your data.")
            return
        reading.data["packing"] = packed
        reading.note(f"{said} becomes data.packing.")
    elif packed:
        reading.note(f"{said}: every sequence is planned as full, as Shardwise's data are.")
    else:
        reading.drop(
            f"{said}: shorter sequences are padded; planned as if each had job.seq_len tokens."
        )
