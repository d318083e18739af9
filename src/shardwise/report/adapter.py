"""What of a model is trained, in a sentence."""

from __future__ import annotations

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.quantity import show_count

_STORED = {"nf4": "in 4 bits (NF4)", "int8": "in 8 bits"}


def adapter_words(adapter: Adapter, trained: int, total: int) -> str:
    """Such as "Trains LoRA of rank 16 on all linear layers: 41.9M of 8.07B parameters. …"."""
    stored = _STORED.get(adapter.base, f"in {adapter.base}")
    return (
        f"Trains {_what(adapter)}: {show_count(trained)} of {show_count(total)} parameters. "
        f"The rest is frozen, stored {stored}."
    )


def _what(adapter: Adapter) -> str:
    parts = []
    if adapter.rank is not None:
        name = "DoRA" if adapter.dora else "LoRA"
        everywhere = adapter.targets == (ALL_LINEAR,)
        where = "all linear layers" if everywhere else ", ".join(adapter.targets)
        parts.append(f"{name} of rank {adapter.rank} on {where}")
    if adapter.train:
        parts.append(f"parameters with {' or '.join(adapter.train)} in their name")
    return " and ".join(parts)
