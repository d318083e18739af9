"""Tokens that a library such as DeepEP sends to their experts, in place of torch's all-to-all.

It sends one copy of a token to each device of an expert group that has one of its experts; between
nodes one to each other node, which passes it on. Between dispatch and products, tokens are then
copied as often as without expert parallelism. Memory is taken to be that of torch's all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dispatch import Dispatch
from shardwise.spec.kernels import distinct_groups
from shardwise.spec.software import find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Exchange, Exchanges
from shardwise.units.stage import Stage
from shardwise.units.unit import ModelUnits, Unit

# Copies of a token, by the number of experts and of those that are chosen for it.
Copies = Callable[[int, int], float]


def dispatch_of(strategy: Strategy, cluster: ClusterSpec) -> Dispatch:
    """The dispatch of a run: that of its strategy, else of its cluster's software."""
    if strategy.dispatch is not None:
        return strategy.dispatch
    return find_software(cluster.software).dispatch_on(cluster.device)


def groups_among(degree: int, devices_per_node: int) -> int:
    """Groups of an expert group's experts that a token is sent to once: its nodes, or its devices.

    Its `degree` devices are neighbours; they count one by one if they are in one node.
    """
    nodes = degree // devices_per_node
    return nodes if nodes > 1 else degree


def copies_among(degree: int, devices_per_node: int) -> Copies:
    """Mean copies of a token in an expert group; any choice of experts is as likely."""
    groups = groups_among(degree, devices_per_node)
    return lambda experts, chosen: distinct_groups(experts, chosen, groups)


def sent_by_library(units: ModelUnits, undivided: ModelUnits, copies: Copies) -> ModelUnits:
    """The units of divided experts with so many copies of a token; `undivided` are the model's."""
    made: dict[int, Unit] = {}
    for block, whole in zip(units.blocks, undivided.blocks, strict=True):
        if id(block) not in made:
            made[id(block)] = _sent(block, whole.stage, units, copies)
    return replace(units, blocks=tuple(made[id(block)] for block in units.blocks))


def _sent(block: Unit, whole: Stage, units: ModelUnits, copies: Copies) -> Unit:
    """A block whose tokens a library sends; `whole` is its computation without division."""
    stage, division = block.stage, units.division
    own = [part for part in stage.parts if part.of_experts]
    if not own:
        return block
    others = [part for part in stage.parts if not part.of_experts]
    chosen = round(own[0].routed / division.routing)
    share = copies(own[0].experts * division.expert, chosen) / chosen
    moved = {
        name: getattr(whole, name) - sum(getattr(part, name) for part in others)
        for name in ("elementwise_bytes", "fused_bytes", "kernels")
    }
    parts = tuple(
        replace(
            part,
            by_library=part.of_experts,
            exchanges=_fewer(part.exchanges, share),
            **(moved if part.of_experts else {}),
        )
        for part in stage.parts
    )
    changed = replace(stage, parts=parts, exchanges=_fewer(stage.exchanges, share))
    return replace(block, stage=changed)


def _fewer(exchanges: Exchanges, share: float) -> Exchanges:
    """The exchanges with this share of the bytes of tokens."""

    def sent(one: Exchange) -> Exchange:
        if one.axis != "expert" or one.host:
            return one
        return one._replace(bytes=one.bytes * share)

    return Exchanges(*(tuple(map(sent, way)) for way in exchanges))
