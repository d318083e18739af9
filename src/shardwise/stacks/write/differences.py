"""A strategy as another stack runs it, field by field, and why it differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference, shown
from shardwise.units.decoder import decoder_units

# Fields without effect where nothing is sharded, and where a step has one micro-batch.
_OF_SHARDING = ("reshard_after_forward", "reshard_after_backward", "prefetch", "forward_prefetch",
                "blocks_per_unit", "split_root")  # fmt: skip
_OF_ACCUMULATION = ("grad_sync", "reshard_after_backward")
# Fields without effect where matrices are not divided.
_OF_TENSOR = ("sequence_parallel", "tensor_across_nodes")


class Rule(NamedTuple):
    """Why a stack runs some fields otherwise.

    `{who}` in the reason stands for the stack, `{kind}` and the like for its value of a field.
    """

    fields: tuple[str, ...]
    why: str


# Of stacks that divide matrices with the plan of transformers, which leaves the rest whole.
WHOLE_ACTIVATIONS = Rule(
    ("sequence_parallel",),
    "the plan of transformers divides matrices only; what lies between them is whole on every "
    "device of a tensor group",
)
TENSOR_INSIDE = Rule(
    ("tensor_across_nodes",), "the devices of a tensor group are neighbours, inside a node"
)
# Of stacks that run ring attention.
RING = Rule(
    ("context_method",),
    "the stack runs ring attention: keys and values pass from device to device, heads stay",
)
# Of stacks whose file has no loss.
PLAIN_LOSS = Rule(("loss", "loss_chunks"), "all logits of a micro-batch are in memory at once")


# Of stacks whose file does not choose the dtype of products.
LOW_BITS = Rule(
    ("linear_dtype", "low_bit_gather"), "products run in the compute dtype unless you convert them"
)


class Comparison(NamedTuple):
    """A strategy as the stack runs it, and what to tell about the difference."""

    applied: Strategy
    differences: list[Difference]
    by_script: list[Difference]


def compare(
    run: RunSpec,
    read_back: Mapping[str, object],
    rules: Iterable[Rule],
    script: Mapping[str, object] | None = None,
    script_rules: Iterable[Rule] = (),
    who: str = "the stack",
) -> Comparison:
    """Compare a run with the fields that are read back from the file of another stack.

    `script` are fields that the file cannot hold but the user's script sets, with the values that
    it can set them to. Fields without effect in this run do not differ.
    """
    cluster, ours = run.cluster, run.strategy
    size = cluster.devices, cluster.devices_per_node
    by_file = Strategy.read(read_back).resolve(*size)
    applied = Strategy.read({**read_back, **(script or {})}).resolve(*size)
    settled = {
        name: value
        for name, value in changed_fields(applied, by_file).items()
        if name in (script or {})
    }
    return Comparison(
        applied,
        _by_rules(changed_fields(ours, applied), applied, rules, who),
        _by_rules(settled, applied, script_rules, who),
    )


def changed_fields(ours: Strategy, theirs: Strategy) -> dict[str, object]:
    """Our values of the fields that have an effect and differ."""
    return {
        name: getattr(ours, name)
        for name in Strategy.model_fields
        if not _same(name, getattr(ours, name), getattr(theirs, name))
        and name not in without_effect(ours)
    }


def _by_rules(
    differing: dict[str, object], there: Strategy, rules: Iterable[Rule], who: str
) -> list[Difference]:
    """Fields that differ, joined where one rule gives the reason for several."""
    left = dict(differing)
    values = {name: shown(getattr(there, name)) for name in Strategy.model_fields}
    differences = []
    for rule in (
        *rules,
        TENSOR_INSIDE,
        PLAIN_LOSS,
        LOW_BITS,
        *(Rule((name,), f"the stack uses {{{name}}}") for name in differing),
    ):
        fields = [name for name in rule.fields if name in left]
        if fields:
            why = rule.why.format(who=who, **values)
            ours = {name: left.pop(name) for name in fields}
            theirs = {name: getattr(there, name) for name in fields}
            differences.append(Difference(why, ours, theirs))
    return differences


def without_effect(strategy: Strategy) -> set[str]:
    """Fields that change nothing in a run of this strategy."""
    found = {"within_node"}
    if strategy.loss == "plain":
        found |= {"loss_chunks"}
    if strategy.accumulate == 1:
        found |= {*_OF_ACCUMULATION}
    if strategy.sharded:
        found |= {"ddp_bucket_mib"}
    else:
        found |= {*_OF_SHARDING}
    if strategy.tensor == 1:
        found |= {*_OF_TENSOR}
    if strategy.context == 1:
        found |= {"context_method"}
    if strategy.kind == "single":
        found |= {"reduce_dtype", "grad_sync", "ddp_bucket_mib"}
    return found


def _same(name: str, ours: object, theirs: object) -> bool:
    if name == "recompute":
        # A share of no blocks, or of all of them, has a name.
        named = {0.0: "none", 1.0: "full"}
        ours, theirs = named.get(ours, ours), named.get(theirs, theirs)  # type: ignore[call-overload]
    return ours == theirs


def padded_experts(run: RunSpec, applied: Strategy, who: str) -> list[Difference]:
    """That a stack pads experts, because it shards them along their rows."""
    model, shard = run.model, applied.mesh.states
    if not isinstance(model, ModelSpec) or not model.experts or not applied.sharded:
        return []
    blocks = decoder_units(model, run.job.seq_len).blocks
    if not any(block.rearranged(shard) for block in blocks):
        return []
    padded = -(-model.experts // shard) * shard
    why = (
        f"{who} shards dimension 0 of every tensor, which pads the {model.experts} experts of a "
        f"layer to {padded}. Shardwise divides each expert instead"
    )
    return [Difference(why, about="Experts")]


def recompute_all_or_none(strategy: Strategy) -> str:
    """The policy of a stack that recomputes every block or none."""
    return "none" if strategy.recompute in ("none", 0.0) else "full"
