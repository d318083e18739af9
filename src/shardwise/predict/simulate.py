"""One optimizer step as a race of streams, by FSDP2's rules, for many configurations at once.

What waits for what, as torch 2.13 issues it (the host runs ahead of the device):

- Forward: a unit is gathered, copied out on the compute stream, computed. The next unit's gather
  starts when this one has been copied out (earlier with `forward_prefetch`). The root comes first.
- Backward: before unit i computes, the gather of unit i-1 is issued; after it has computed, its
  gradients are copied into the reduce-scatter's input, which waits until the previous
  reduce-scatter has given its own back. Gathers and reduce-scatters share one communicator and
  run in the order they were issued, unless reductions have a group of their own.
- Hybrid sharding all-reduces on a stream beside the rest; DDP all-reduces what its backward has
  finished.
- Compute that runs beside a collective is slowed by a share of the time they overlap.

Every step of the recurrence is a numpy operation over all configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.predict.configurations import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Durations:
    """Seconds of each piece: (rows, blocks) for blocks, (rows,) for the root and the rest.

    A piece that does not happen takes 0 seconds: gathers of what stays gathered, copies of what is
    not sharded, reductions of micro-batches that do not reduce.
    """

    forward: Floats
    backward: Floats
    gather: Floats
    gather_again: Floats
    scatter: Floats
    reduce: Floats
    copy_out: Floats
    copy_in: Floats
    root_forward: Floats
    root_backward: Floats
    root_gather: Floats
    root_scatter: Floats
    root_reduce: Floats
    root_copy_out: Floats
    root_copy_in: Floats
    optimizer: Floats

    @property
    def blocks(self) -> int:
        return int(self.forward.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rules:
    """What each row's schedule obeys."""

    prefetch: Ints
    forward_prefetch: Ints
    # Reductions have a communicator of their own.
    separate: Bools
    # Seconds lost per second of compute that runs beside a collective.
    contention: Floats
    # Micro-batches per step, and which of them gather and reduce.
    accumulate: Ints
    gathers_every: Bools
    scatters_every: Bools
    reduces_every: Bools


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Times:
    """Seconds per row; compute, copies, exposed communication and optimizer sum to the step."""

    step_s: Floats
    compute_s: Floats
    copy_s: Floats
    exposed_communication_s: Floats
    optimizer_s: Floats
    communication_s: Floats


class _Streams:
    """When each stream is free, and what has been spent on what."""

    def __init__(self, rows: int) -> None:
        zero: Floats = np.zeros(rows)
        self.compute = self.gather = self.scatter = self.reduce = zero
        self.computed = self.copied = self.moved = zero


def simulate(d: Durations, rules: Rules) -> Times:
    """Play all micro-batches; equal ones in the middle are played once and repeated."""
    rows = len(d.optimizer)
    streams = _Streams(rows)
    k = rules.accumulate
    first = _micro_batch(d, rules, streams, first=True, final=k == 1)
    # From the second on, all but the last are alike.
    middle = np.maximum(k - 2, 0)
    if (k > 2).any():
        second = _micro_batch(d, rules, first, first=False, final=np.zeros(rows, dtype=np.bool_))
        streams = _advanced(first, second, middle)
    else:
        streams = first
    if (k > 1).any():
        last = _micro_batch(d, rules, streams, first=False, final=np.ones(rows, dtype=np.bool_))
        streams = _choose(k > 1, last, streams)
    end = np.maximum.reduce([streams.compute, streams.gather, streams.scatter, streams.reduce])
    step = end + d.optimizer
    return Times(
        step_s=step,
        compute_s=streams.computed,
        copy_s=streams.copied,
        exposed_communication_s=end - streams.computed - streams.copied,
        optimizer_s=d.optimizer,
        communication_s=streams.moved,
    )


_FIELDS = ("compute", "gather", "scatter", "reduce", "computed", "copied", "moved")


def _advanced(before: _Streams, after: _Streams, times: Ints) -> _Streams:
    """`before`, moved on by `times` repetitions of what led to `after`."""
    result = _Streams(len(times))
    for name in _FIELDS:
        start, end = getattr(before, name), getattr(after, name)
        setattr(result, name, start + (end - start) * times)
    return result


def _choose(where: Bools, one: _Streams, other: _Streams) -> _Streams:
    result = _Streams(len(where))
    for name in _FIELDS:
        setattr(result, name, np.where(where, getattr(one, name), getattr(other, name)))
    return result


def _copy(streams: _Streams) -> _Streams:
    result = _Streams(len(streams.compute))
    for name in _FIELDS:
        setattr(result, name, getattr(streams, name))
    return result


def _micro_batch(
    d: Durations, rules: Rules, before: _Streams, *, first: bool, final: Bools
) -> _Streams:
    s = _copy(before)
    gathers = np.ones_like(final) if first else rules.gathers_every
    scatters = final | rules.scatters_every
    reduces = final | rules.reduces_every
    # A micro-batch begins when the one before has computed; its communication may still run.
    _forward(d, rules, s, gathers)
    _backward(d, rules, s, scatters, reduces)
    return s


def _gather(s: _Streams, ready: Floats, seconds: Floats) -> Floats:
    """Queue a gather; returns when it is done."""
    end = np.maximum(s.gather, ready) + seconds
    # What takes no time is not queued.
    s.gather = np.where(seconds > 0, end, s.gather)
    s.moved = s.moved + seconds
    return np.where(seconds > 0, end, ready)


def _forward(d: Durations, rules: Rules, s: _Streams, gathers: Bools) -> None:
    n = d.blocks
    done = _gather(s, s.compute, np.where(gathers, d.root_gather, 0.0))
    copy = np.where(gathers, d.root_copy_out, 0.0)
    s.compute = np.maximum(s.compute, done) + copy
    s.copied = s.copied + copy
    copied_out = [s.compute]
    for i in range(n):
        # The gather of unit i waits until the unit `1 + forward_prefetch` before it is copied out.
        reach = np.maximum(i - rules.forward_prefetch, 0)
        ready = _pick(copied_out, reach)
        done = _gather(s, ready, np.where(gathers, d.gather[:, i], 0.0))
        copy = np.where(gathers, d.copy_out[:, i], 0.0)
        s.compute = np.maximum(s.compute, done) + copy
        s.copied = s.copied + copy
        copied_out.append(s.compute)
        beside = np.where(gathers, d.gather[:, i + 1], 0.0) if i + 1 < n else 0.0 * copy
        busy = np.where(beside > 0, np.maximum(s.gather, s.compute) + beside, s.gather)
        _compute(s, d.forward[:, i], busy, rules)
    _compute(s, d.root_forward, s.gather, rules)


def _pick(columns: list[Floats], index: Ints) -> Floats:
    """Row by row the column that `index` names."""
    low, high = int(index.min()), int(index.max())
    return columns[low] if low == high else np.choose(index - low, columns[low : high + 1])


def _compute(s: _Streams, seconds: Floats, busy_until: Floats, rules: Rules) -> None:
    """Compute beside whatever moves until `busy_until`."""
    beside = np.clip(np.minimum(busy_until, s.compute + seconds) - s.compute, 0.0, None)
    taken = seconds + rules.contention * beside
    s.compute = s.compute + taken
    s.computed = s.computed + taken


def _backward(d: Durations, rules: Rules, s: _Streams, scatters: Bools, reduces: Bools) -> None:
    n = d.blocks
    ahead: dict[int, Floats] = {}

    def issue(index: int, rows: Bools) -> None:
        """Queue the gather of block `index` for some rows, now."""
        seconds = np.where(rows, d.gather_again[:, index], 0.0)
        done = _gather(s, s.compute, seconds)
        ahead[index] = np.where(rows, done, ahead.get(index, s.compute))

    depths = [int(depth) for depth in np.unique(rules.prefetch) if depth > 0]
    for step in range(1, max(depths, default=0) + 1):
        if n - step >= 0:
            issue(n - step, rules.prefetch >= step)
    _compute(s, d.root_backward, s.gather, rules)
    returned = s.scatter
    for i in reversed(range(n)):
        if (rules.prefetch == 0).any():
            issue(i, rules.prefetch == 0)
        s.compute = np.maximum(s.compute, ahead.get(i, s.compute))
        again = d.gather_again[:, i] > 0
        copy = np.where(again, d.copy_out[:, i], 0.0)
        s.compute = s.compute + copy
        s.copied = s.copied + copy
        # Those nearer were issued by the blocks before.
        for depth in depths:
            if i - depth >= 0:
                issue(i - depth, rules.prefetch == depth)
        busy = np.maximum.reduce([s.gather, s.scatter, s.reduce])
        _compute(s, d.backward[:, i], busy, rules)
        returned = _reduce(
            d.copy_in[:, i], d.scatter[:, i], d.reduce[:, i], rules, s, returned, scatters, reduces
        )
    _reduce(d.root_copy_in, d.root_scatter, d.root_reduce, rules, s, returned, scatters, reduces)


def _reduce(
    copy_in: Floats,
    scatter: Floats,
    reduce: Floats,
    rules: Rules,
    s: _Streams,
    returned: Floats,
    scatters: Bools,
    reduces: Bools,
) -> Floats:
    """Copy gradients in, scatter, all-reduce; returns when the scatter's input is free again."""
    copy = np.where(scatters, copy_in, 0.0)
    seconds = np.where(scatters, scatter, 0.0)
    s.compute = np.where(seconds > 0, np.maximum(s.compute, returned), s.compute) + copy
    s.copied = s.copied + copy
    free = np.where(rules.separate, s.scatter, np.maximum(s.gather, s.scatter))
    end = np.maximum(free, s.compute) + seconds
    moves = seconds > 0
    s.scatter = np.where(moves, end, s.scatter)
    s.gather = np.where(moves & ~rules.separate, end, s.gather)
    s.moved = s.moved + seconds
    across = np.where(reduces, reduce, 0.0)
    finished = np.maximum(s.reduce, np.where(moves, s.scatter, s.compute)) + across
    s.reduce = np.where(across > 0, finished, s.reduce)
    s.moved = s.moved + across
    return np.where(moves, s.scatter, returned)
