"""What becomes of a strategy in another stack, field by field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy

# Nothing is gathered, or nothing accumulated, that these could be about.
_OF_SHARDING = ("reshard_after_forward", "reshard_after_backward", "prefetch", "forward_prefetch",
                "blocks_per_unit")  # fmt: skip
_OF_ACCUMULATION = ("grad_sync", "reshard_after_backward")


class Rule(NamedTuple):
    """What to say where any of some fields differs. `{field}` stands for what it is there."""

    fields: tuple[str, ...]
    sentence: str


def losses(run: RunSpec, there: dict[str, object], rules: Iterable[Rule]) -> list[str]:
    """A sentence for every field that means something in this run and differs there.

    `there` are the fields that the other stack's file says when it is read back.
    """
    ours = run.strategy
    theirs = Strategy.read(there).resolve(run.cluster.devices, run.cluster.devices_per_node)
    left = {
        name: getattr(ours, name)
        for name in Strategy.model_fields
        if not _same(name, getattr(ours, name), getattr(theirs, name))
        and name not in meaningless(ours)
    }
    said = []
    named = {name: _shown(getattr(theirs, name)) for name in Strategy.model_fields}
    for rule in (*rules, *(Rule((name,), f"it is {{{name}}} there") for name in left)):
        fields = [name for name in rule.fields if name in left]
        if fields:
            ours_told = ", ".join(f"{name} = {_shown(left.pop(name))}" for name in fields)
            said.append(f"{ours_told}: {rule.sentence.format(**named)}.")
    return said


def meaningless(strategy: Strategy) -> set[str]:
    """Fields that change nothing in a run of this strategy."""
    found = {"within_node"}
    if strategy.accumulate == 1:
        found |= {*_OF_ACCUMULATION}
    if strategy.sharded:
        found |= {"ddp_bucket_mib"}
    else:
        found |= {*_OF_SHARDING}
    return found


def _same(name: str, ours: object, theirs: object) -> bool:
    if name == "recompute":
        # A share of no blocks, or of all of them, has a name.
        named = {0.0: "none", 1.0: "full"}
        ours, theirs = named.get(ours, ours), named.get(theirs, theirs)  # type: ignore[call-overload]
    return ours == theirs


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
