"""Shares of a step: devices that compute different numbers of micro-batches.

Ranks wait for each other only where they communicate. Devices of different speed therefore finish
together if faster ones compute more micro-batches between two collectives that all take part in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shardwise.spec.record import Record, SpecError

if TYPE_CHECKING:
    from shardwise.spec.strategy import Strategy

_Count = Annotated[int, Field(ge=1, le=2**20)]


class Share(Record):
    """Micro-batches per step, `accumulate`, of each of so many consecutive devices."""

    devices: _Count
    accumulate: _Count


def shares_of(counts: str, devices: Sequence[int]) -> tuple[Share, ...]:
    """The shares of parts of so many `devices` each, from micro-batches by part such as "3,2"."""
    found = [count.strip() for count in counts.split(",")]
    if len(found) != len(devices) or not all(count.isdigit() and int(count) for count in found):
        raise SpecError(
            f"strategy.shares: cannot read {counts[:60]!r}; write the micro-batches of each of the "
            f"{len(devices)} parts of the cluster, such as "
            f"{','.join(str(len(devices) + 1 - n) for n in range(len(devices)))}"
        )
    return tuple(
        Share(devices=n, accumulate=int(count)) for n, count in zip(devices, found, strict=True)
    )


def with_most(data: object) -> object:
    """Fields of a strategy with `accumulate` set to the most micro-batches of its shares."""
    if not isinstance(data, dict) or "accumulate" in data:
        return data
    if not isinstance(data.get("shares"), (list, tuple)):
        return data
    counts = [
        one.accumulate if isinstance(one, Share) else one.get("accumulate")
        for one in data["shares"]
        if isinstance(one, (Share, dict))
    ]
    known = [count for count in counts if isinstance(count, int)]
    return {**data, "accumulate": max(known)} if known else data


def counts_by_rank(strategy: Strategy) -> tuple[int, ...]:
    """The micro-batches in a step of each data-parallel rank; empty if all have the same."""
    shares, inner = strategy.shares or (), strategy.mesh.inner
    if len({one.accumulate for one in shares}) < 2:
        return ()
    return tuple(one.accumulate for one in shares for _ in range(one.devices // inner))


def problems_of_shares(strategy: Strategy) -> list[str]:
    """Inconsistent settings of shares, one text each."""
    if strategy.shares is None:
        return []
    most = max(one.accumulate for one in strategy.shares)
    if strategy.kind == "single":
        return ["kind 'single' has one device, which computes every share; leave shares out"]
    if strategy.accumulate != most:
        return [f"accumulate follows from shares, whose most is {most}; leave it out"]
    return []


def check_shares(strategy: Strategy) -> None:
    """Raise SpecError if a resolved strategy cannot run with its shares.

    Devices with different numbers of micro-batches can only communicate once in a step.
    """
    shares = strategy.shares
    if shares is None:
        return
    total = sum(one.devices for one in shares)
    if total != strategy.devices:
        raise SpecError(
            f"strategy.shares: are of {total} devices, but there are {strategy.devices}; give "
            "shares whose devices sum to that, or leave them out"
        )
    if len({one.accumulate for one in shares}) == 1:
        return
    inner = strategy.mesh.inner
    if strategy.tensor_across_nodes or any(one.devices % inner for one in shares):
        raise SpecError(
            f"strategy.shares: devices of a tensor or context group compute together; give shares "
            f"of whole groups of {inner}, and leave out tensor_across_nodes"
        )
    common = math.gcd(*(one.devices for one in shares))
    replica = strategy.devices // (strategy.replicate or 1)
    if common % replica == 0:
        if strategy.grad_sync == "every" and (strategy.replicate or 1) > 1:
            raise SpecError(
                "strategy.grad_sync: 'every' reduces gradients across shares in each micro-batch, "
                "of which they have different numbers; set local or last"
            )
        return
    _check_once_a_step(strategy, common)


def _check_once_a_step(strategy: Strategy, common: int) -> None:
    """Raise SpecError if states sharded across shares are moved more than once in a step."""
    moved = "reduces gradients" if strategy.grad_sync != "last" else ""
    if strategy.reshard_after_forward is not False or strategy.reshard_after_backward:
        moved = "gathers parameters"
    if strategy.expert > 1:
        moved = "sends tokens to experts"
    if moved:
        groups = common // strategy.mesh.inner
        inside = f", or shard inside each part (zero3:{groups})" if groups > 1 else ""
        raise SpecError(
            f"strategy.shares: {strategy.kind} {moved} across shares in each micro-batch, of which "
            f"they have different numbers; choose ddp or zero1{inside}"
        )
