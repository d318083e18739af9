"""Which parameters of a model are trained, in a sentence."""

from __future__ import annotations

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.lookup import Model
from shardwise.spec.quantity import show_count
from shardwise.step.profile import StepProfile

_STORED = {"nf4": "in 4 bits (NF4)", "int8": "in 8 bits", "fp8": "in fp8"}


def adapter_words(model: Model, trained: int, total: int, *, mixture: bool) -> str:
    """Such as "Trains LoRA of rank 16 on all linear layers: 41.9M of 8.07B parameters. …".

    `trained` and `total` are numbers of parameters. `mixture` says whether blocks have stacked
    experts, which of a traced model only its units know. Empty for a model without adapters.
    """
    adapter = model.adapter
    if adapter is None:
        return ""
    share = f"{show_count(trained)} of {show_count(total)} parameters"
    return (
        f"Trains {_trained_parts(adapter, mixture)}: {share}. The rest is frozen, stored "
        f"{_stored_parts(adapter, mixture)}."
    )


def profile_adapter_words(model: Model, profile: StepProfile) -> str:
    """The same sentence for a run, with the counts of its predicted step."""
    counts = profile.model
    trained, mixture = counts.get("trained_parameters", 0), counts.get("mixture", False)
    return adapter_words(model, trained, counts["parameters"], mixture=mixture)


def _stored_parts(adapter: Adapter, mixture: bool) -> str:
    """How frozen weights are stored, such as "in 4 bits (NF4): matrices of blocks; all else …"."""
    if adapter.base not in _STORED:
        return f"in {adapter.base}"
    kept = "the experts and all else" if mixture and not adapter.quantises_experts else "all else"
    return f"{_STORED[adapter.base]}: matrices of blocks; {kept} in {adapter.float_dtype}"


def _trained_parts(adapter: Adapter, mixture: bool) -> str:
    """The trained parts, such as "LoRA of rank 16 on all linear layers"."""
    parts = []
    if adapter.rank is not None:
        name = "DoRA" if adapter.dora else "LoRA"
        everywhere = adapter.targets == (ALL_LINEAR,)
        linear = "all linear layers but not the experts" if mixture else "all linear layers"
        where = linear if everywhere else ", ".join(adapter.targets)
        parts.append(f"{name} of rank {adapter.rank} on {where}")
    if adapter.train:
        parts.append(f"parameters with {' or '.join(adapter.train)} in their name")
    return " and ".join(parts)
