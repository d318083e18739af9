"""Which parameters of a model are trained, in a sentence."""

from __future__ import annotations

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.lookup import Model
from shardwise.spec.quantity import show_count

_STORED = {"nf4": "in 4 bits (NF4)", "int8": "in 8 bits", "fp8": "in fp8, matrices of blocks"}


def adapter_words(model: Model, trained: int, total: int) -> str:
    """Such as "Trains LoRA of rank 16 on all linear layers: 41.9M of 8.07B parameters. …".

    `trained` and `total` are numbers of parameters. Empty for a model without adapters.
    """
    adapter = model.adapter
    if adapter is None:
        return ""
    experts = getattr(model, "experts", None) is not None
    stored = _STORED.get(adapter.base, f"in {adapter.base}")
    kept = getattr(model, "unquantised_experts", None)
    if kept is not None:
        stored += f", but for the experts, which stay in {kept}"
    share = f"{show_count(trained)} of {show_count(total)} parameters"
    return (
        f"Trains {_trained_parts(adapter, experts)}: {share}. The rest is frozen, stored {stored}."
    )


def _trained_parts(adapter: Adapter, experts: bool) -> str:
    """The trained parts, such as "LoRA of rank 16 on all linear layers"."""
    parts = []
    if adapter.rank is not None:
        name = "DoRA" if adapter.dora else "LoRA"
        everywhere = adapter.targets == (ALL_LINEAR,)
        linear = "all linear layers but not the experts" if experts else "all linear layers"
        where = linear if everywhere else ", ".join(adapter.targets)
        parts.append(f"{name} of rank {adapter.rank} on {where}")
    if adapter.train:
        parts.append(f"parameters with {' or '.join(adapter.train)} in their name")
    return " and ".join(parts)
