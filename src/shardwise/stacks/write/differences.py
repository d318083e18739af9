"""Compare a strategy with what another stack runs, field by field, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.spec.dispatch import ALL_TO_ALL
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference, value_text
from shardwise.units.decoder import decoder_units

# Fields without effect if nothing is sharded, and if a step has one micro-batch.
_OF_SHARDING = ("reshard_after_forward", "reshard_after_backward", "prefetch", "forward_prefetch",
                "blocks_per_unit", "split_root")  # fmt: skip
_OF_ACCUMULATION = ("grad_sync", "reshard_after_backward")
# Fields without effect without tensor parallelism.
_OF_TENSOR = ("sequence_parallel", "tensor_across_nodes")


class Rule(NamedTuple):
    """The reason why a stack changes some fields of a strategy.

    In the reason, `{who}` is replaced by the stack and `{kind}` and the like by its value.
    """

    fields: tuple[str, ...]
    why: str


# For stacks with transformers' plan for tensor parallelism, which shards matrices only.
WHOLE_ACTIVATIONS = Rule(
    ("sequence_parallel",),
    "the plan of transformers divides matrices only; what lies between them is whole on every "
    "device of a tensor group",
)
TENSOR_INSIDE = Rule(
    ("tensor_across_nodes",), "the devices of a tensor group are neighbours, inside a node"
)
# For stacks whose file Shardwise writes without expert parallelism.
UNDIVIDED_EXPERTS = Rule(
    ("expert",), "the exported file divides no experts: every device gathers all of a layer"
)
# For scripts that load their model with transformers.
EXPERTS_AT_LOADING = Rule(
    ("expert",),
    "the file divides no experts. transformers does where it also shards: leave fsdp out of the "
    "file and load the model with from_pretrained(..., distributed_config="
    "DistributedConfig(fsdp_size=..., ep_size=...))",
)
# For stacks with ring attention.
RING = Rule(
    ("context_method",),
    "the stack runs ring attention: keys and values pass from device to device, heads stay",
)
# For stacks with a file that cannot choose the loss.
PLAIN_LOSS = Rule(
    ("loss", "loss_chunks", "loss_kernel"), "all logits of a micro-batch are in memory at once"
)


ATTENTION = Rule(
    ("attention",), "set attn_implementation where the model is loaded; the file does not name it"
)
# For stacks with a file that cannot choose the dtype of matrix products.
LOW_BITS = Rule(
    ("linear_dtype", "low_bit_gather"), "products run in the compute dtype unless you convert them"
)


# For stacks with a file that cannot choose a communication hook of DDP.
COMPRESSION = Rule(
    ("compress", "powersgd_rank", "powersgd_start"),
    "the file cannot name a communication hook; gradients are averaged as they are",
)


class Comparison(NamedTuple):
    """A strategy as the stack runs it, and the differences to report."""

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
    """Compare a run's strategy with the fields that are read back from another stack's file.

    Fields without effect in this run count as equal.

    Args:
        run: The run, its strategy resolved.
        read_back: The fields of the strategy in the file.
        rules: The reasons for fields that differ.
        script: Fields that the user's script or the start command sets, and their values there.
        script_rules: The sentences for those fields.
        who: The stack, as sentences name it.
    """
    cluster, ours = run.cluster, run.strategy
    size = cluster.devices, cluster.devices_per_node
    # A file that does not say how tokens travel to experts leaves it to torch.
    read_back = {"dispatch": ALL_TO_ALL, **read_back}
    # What the run does not name is the stack's choice.
    unnamed = {name for name in ("attention", "dispatch") if getattr(ours, name) is None}
    read_back = {name: value for name, value in read_back.items() if name not in unnamed}
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
    """The fields of `ours` that have an effect and differ in `theirs`, with our values."""
    return {
        name: getattr(ours, name)
        for name in Strategy.model_fields
        if not _same(name, getattr(ours, name), getattr(theirs, name))
        and name not in without_effect(ours)
    }


def _by_rules(
    differing: dict[str, object], there: Strategy, rules: Iterable[Rule], who: str
) -> list[Difference]:
    """One difference for each rule that applies, with all its fields that differ.

    `differing` are our values, `there` is the stack's strategy.
    """
    left = dict(differing)
    values = {name: value_text(getattr(there, name)) for name in Strategy.model_fields}
    differences = []
    for rule in (
        *rules,
        TENSOR_INSIDE,
        UNDIVIDED_EXPERTS,
        PLAIN_LOSS,
        LOW_BITS,
        ATTENTION,
        COMPRESSION,
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
    """The names of fields that change nothing in a run with this strategy."""
    found = {"within_node"}
    if strategy.loss != "chunked":
        found |= {"loss_chunks"}
    if strategy.loss != "fused":
        found |= {"loss_kernel"}
    if strategy.attention is None:
        found |= {"attention"}
    if strategy.dispatch is None or strategy.expert == 1:
        found |= {"dispatch"}
    if strategy.accumulate == 1:
        found |= {*_OF_ACCUMULATION}
    if strategy.compress != "powersgd":
        found |= {"powersgd_rank", "powersgd_start"}
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
    """Whether two values of the field `name` are equal; recompute 0.0 and 1.0 have names."""
    if name == "recompute":
        # A share of 0 or 1 of the blocks has a name.
        named = {0.0: "none", 1.0: "full"}
        ours, theirs = named.get(ours, ours), named.get(theirs, theirs)  # type: ignore[call-overload]
    return ours == theirs


def padded_experts(run: RunSpec, applied: Strategy, who: str) -> list[Difference]:
    """One difference if the stack pads experts by sharding along dimension 0; else empty."""
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
    """The recompute of a stack that recomputes either every block or none: "none" or "full"."""
    return "none" if strategy.recompute in ("none", 0.0) else "full"
