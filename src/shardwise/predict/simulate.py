"""One optimizer step simulated on streams by FSDP2's rules, for many configurations at once.

What waits for what, as torch 2.13 issues it (the host runs ahead of the device):

- Forward: a unit is gathered, copied out on the compute stream, computed. The next unit's gather
  starts when this one has been copied out (earlier with `forward_prefetch`). The root comes first.
- Backward: before unit i computes, the gather of unit i-1 is issued; after it has computed, its
  gradients are copied into the reduce-scatter's input, which waits until the previous
  reduce-scatter has given its own back. Gathers and reduce-scatters share one communicator and
  run in the order they were issued, unless reductions have a group of their own.
- Hybrid sharding all-reduces on a stream beside the rest; DDP all-reduces what its backward has
  finished, and its backward ends with the last of them.
- Compute that runs beside a collective is slowed by a share of the time they overlap.

Every step of the recurrence is a numpy operation over all configurations. Blocks repeat: as soon as
one equal block after another moves every stream by the same time, the rest of them is a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise

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
    # Of what the backward makes first: the head, where it is a bucket of its own.
    head_reduce: Floats
    root_copy_out: Floats
    root_copy_in: Floats
    optimizer: Floats

    @property
    def blocks(self) -> int:
        return int(self.forward.shape[1])

    def runs(self) -> list[tuple[int, int]]:
        """For each block the first and the last of the equal blocks around it."""
        columns = [self.forward, self.backward, self.gather, self.gather_again]
        columns += [self.scatter, self.reduce, self.copy_out, self.copy_in]
        count = self.blocks
        differs = np.zeros(max(count - 1, 0), dtype=np.bool_)
        for column in columns:
            differs |= (column[:, 1:] != column[:, :-1]).any(axis=0)
        edges = [0, *(np.flatnonzero(differs) + 1).tolist(), count]
        return [(a, b - 1) for a, b in pairwise(edges) for _ in range(a, b)]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rules:
    """What each row's schedule obeys."""

    prefetch: Ints
    forward_prefetch: Ints
    # Reductions have a communicator of their own.
    separate: Bools
    # Nothing computes while a collective runs: whoever asks for it waits.
    waits: Bools
    # A backward ends when its reductions have, as DDP's does, so that the next forward waits.
    joins: Bools
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

    def take(self, rows: Ints) -> Times:
        """These rows, in this order."""
        return Times(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


# Micro-batches in the middle of a step after which each is like the one before.
SETTLED = 3

# Called with lane, start, end, name and block (-1 is the root) of everything the first row does.
Recorder = Callable[[str, float, float, str, int], None]

_TIMES = ("compute", "gather", "scatter", "reduce", "returned", "fetched", "copied_out")
_SPENT = ("computed", "copied", "moved")
_FIELDS = (*_TIMES, *_SPENT)


class _Streams:
    """When each stream is free, and what has been spent on what."""

    def __init__(self, rows: int, recorder: Recorder | None = None) -> None:
        zero: Floats = np.zeros(rows)
        self.compute = self.gather = self.scatter = self.reduce = zero
        # When the last reduce-scatter gave its input back, the last gather was done, and the last
        # gathered unit had been copied out.
        self.returned = self.fetched = self.copied_out = zero
        self.computed = self.copied = self.moved = zero
        self.recorder = recorder

    def copy(self) -> _Streams:
        result = _Streams(len(self.compute), self.recorder)
        for name in _FIELDS:
            setattr(result, name, getattr(self, name))
        return result

    def stack(self) -> Floats:
        return np.stack([getattr(self, name) for name in _FIELDS])

    def advance(self, by: Floats) -> None:
        """Move every field on; `by` has a row for each."""
        for name, change in zip(_FIELDS, by, strict=True):
            setattr(self, name, getattr(self, name) + change)

    def record(self, lane: str, end: Floats, seconds: Floats, name: str, block: int) -> None:
        if self.recorder is not None and seconds[0] > 0:
            self.recorder(lane, float(end[0] - seconds[0]), float(end[0]), name, block)


class _Watch:
    """Sees when block after block moves all streams alike."""

    def __init__(self, streams: _Streams, depth: int) -> None:
        self.streams, self.depth = streams, depth
        self.last: Floats | None = None
        self.change: Floats | None = None
        self.seen = 0

    def skip(self, blocks: int) -> int:
        """Whether the next `blocks`, equal to the last one, can be skipped; moves the streams."""
        if blocks < 1 or self.streams.recorder is not None:
            return 0
        now = self.streams.stack()
        change = None if self.last is None else now - self.last
        near = 1e-13 * now[0]
        alike = (
            change is not None
            and self.change is not None
            and bool((np.abs(change - self.change) <= near).all())
            and self._keeps(now, change, near)
        )
        self.seen = self.seen + 1 if alike else 0
        self.last, self.change = now, change
        # Units gathered ahead must have been issued by alike blocks too.
        if self.seen <= self.depth:
            return 0
        assert change is not None
        self.streams.advance(change * blocks)
        self.last = self.change = None
        self.seen = 0
        return blocks

    @staticmethod
    def _keeps(now: Floats, change: Floats, near: Floats) -> bool:
        """Who is ahead stays ahead: all move together, or one stands still behind, or the
        all-reduces, for which nobody waits, run away.
        """
        compute, moved = now[0], change[0]
        for index, name in enumerate(_TIMES[1:], start=1):
            together = np.abs(change[index] - moved) <= near
            # Behind already when the last block began, so that it had no part in it.
            behind = (change[index] == 0) & (now[index] <= compute - moved)
            away = (change[index] > moved) & (now[index] >= compute) & (name == "reduce")
            if not (together | behind | away).all():
                return False
        return True


def simulate(d: Durations, rules: Rules, recorder: Recorder | None = None) -> Times:
    """Play all micro-batches; equal ones in the middle are played once and repeated.

    With a `recorder`, which sees the first row, each is played.
    """
    rows = len(d.optimizer)
    none, every = np.zeros(rows, dtype=np.bool_), np.ones(rows, dtype=np.bool_)
    runs = d.runs()
    k = rules.accumulate
    streams = _Streams(rows, recorder)
    _micro_batch(d, rules, streams, runs, first=True, final=k == 1)
    # From the second on all but the last are alike; after a few so is what they find.
    middle = np.maximum(k - 2, 0)
    played = int(middle.max()) if recorder is not None else min(int(middle.max()), SETTLED)
    for number in range(1, played + 1):
        after = streams.copy()
        _micro_batch(d, rules, after, runs, first=False, final=none)
        repeats = middle - played + 1 if number == played else np.ones_like(middle)
        repeats = np.where(middle >= number, np.maximum(repeats, 1), 0)
        streams.advance((after.stack() - streams.stack()) * repeats)
    if (k > 1).any():
        last = streams.copy()
        _micro_batch(d, rules, last, runs, first=False, final=every)
        streams.advance(np.where(k > 1, last.stack() - streams.stack(), 0.0))
    end = np.maximum.reduce([streams.compute, streams.gather, streams.scatter, streams.reduce])
    step = end + d.optimizer
    streams.record("optimizer", step, d.optimizer, "optimizer step", -1)
    return Times(
        step_s=step,
        compute_s=streams.computed,
        copy_s=streams.copied,
        exposed_communication_s=end - streams.computed - streams.copied,
        optimizer_s=d.optimizer,
        communication_s=streams.moved,
    )


def _micro_batch(
    d: Durations,
    rules: Rules,
    s: _Streams,
    runs: list[tuple[int, int]],
    *,
    first: bool,
    final: Bools,
) -> None:
    gathers = np.ones_like(final) if first else rules.gathers_every
    scatters = final | rules.scatters_every
    reduces = final | rules.reduces_every
    # A micro-batch begins when the one before has computed; its communication may still run.
    _forward(d, rules, s, runs, gathers)
    _backward(d, rules, s, runs, scatters, reduces)
    s.compute = np.where(rules.joins, np.maximum(s.compute, s.reduce), s.compute)


def _gather(s: _Streams, rules: Rules, ready: Floats, seconds: Floats, block: int) -> Floats:
    """Queue a gather; returns when it is done."""
    ready = np.where(rules.waits, np.maximum(ready, s.compute), ready)
    end = np.maximum(s.gather, ready) + seconds
    # What takes no time is not queued.
    s.gather = np.where(seconds > 0, end, s.gather)
    s.compute = np.where(rules.waits & (seconds > 0), end, s.compute)
    s.moved = s.moved + seconds
    s.record("all-gather", end, seconds, "all-gather", block)
    return np.where(seconds > 0, end, ready)


def _copy_out(s: _Streams, done: Floats, seconds: Floats, block: int) -> None:
    s.compute = np.maximum(s.compute, done) + seconds
    s.copied = s.copied + seconds
    s.copied_out = s.compute
    s.record("copy", s.compute, seconds, "copy out", block)


def _forward(
    d: Durations, rules: Rules, s: _Streams, runs: list[tuple[int, int]], gathers: Bools
) -> None:
    n = d.blocks
    s.fetched = _gather(s, rules, s.compute, np.where(gathers, d.root_gather, 0.0), -1)
    _copy_out(s, s.fetched, np.where(gathers, d.root_copy_out, 0.0), -1)
    out = {0: s.copied_out}
    near, far = int(rules.forward_prefetch.min()), int(rules.forward_prefetch.max())
    watch = _Watch(s, far)
    i = 0
    while i < n:
        # The gather of unit i waits until the unit `1 + forward_prefetch` before it is copied out.
        ready = out[max(i - near, 0)]
        if near != far:
            reach = np.maximum(i - rules.forward_prefetch, 0)
            for depth in range(near + 1, far + 1):
                index = max(i - depth, 0)
                ready = np.where(reach == index, out[index], ready)
        s.fetched = _gather(s, rules, ready, np.where(gathers, d.gather[:, i], 0.0), i)
        _copy_out(s, s.fetched, np.where(gathers, d.copy_out[:, i], 0.0), i)
        out[i + 1] = s.copied_out
        if i + 1 < n:
            beside = np.where(gathers & ~rules.waits, d.gather[:, i + 1], 0.0)
            busy = np.where(beside > 0, np.maximum(s.gather, s.compute) + beside, s.gather)
        else:
            busy = s.gather
        _compute(s, d.forward[:, i], busy, rules, "forward", i)
        i += 1
        before = s.compute
        # Blocks whose next one is equal too.
        skipped = watch.skip(runs[i - 1][1] - i)
        if skipped:
            moved = s.compute - before
            out = {j + skipped: t + moved for j, t in out.items() if j >= i - far}
            i += skipped
    _compute(s, d.root_forward, s.gather, rules, "forward", -1)


def _compute(
    s: _Streams, seconds: Floats, busy_until: Floats, rules: Rules, name: str, block: int
) -> None:
    """Compute beside whatever moves until `busy_until`."""
    beside = np.clip(np.minimum(busy_until, s.compute + seconds) - s.compute, 0.0, None)
    taken = seconds + rules.contention * beside
    s.compute = s.compute + taken
    s.computed = s.computed + taken
    s.record("compute", s.compute, taken, name, block)


def _backward(
    d: Durations,
    rules: Rules,
    s: _Streams,
    runs: list[tuple[int, int]],
    scatters: Bools,
    reduces: Bools,
) -> None:
    n = d.blocks
    ahead: dict[int, Floats] = {}

    def issue(index: int, rows: Bools) -> None:
        """Queue the gather of block `index` for some rows, now."""
        seconds = np.where(rows, d.gather_again[:, index], 0.0)
        done = _gather(s, rules, s.compute, seconds, index)
        ahead[index] = np.where(rows, done, ahead.get(index, s.compute))
        s.fetched = np.where(rows, done, s.fetched)

    depths = sorted(set(rules.prefetch.tolist()) - {0})
    deepest = max(depths, default=0)
    for step in range(1, min(deepest, n) + 1):
        issue(n - step, rules.prefetch >= step)
    _compute(s, d.root_backward, s.gather, rules, "backward", -1)
    early = np.where(reduces, d.head_reduce, 0.0)
    done = _all_reduce(s, s.compute, early, -1)
    s.compute = np.where(rules.waits & (early > 0), done, s.compute)
    s.returned = s.scatter
    at_once = rules.prefetch == 0
    watch = _Watch(s, deepest)
    i = n - 1
    while i >= 0:
        if at_once.any():
            issue(i, at_once)
        copy = np.where(d.gather_again[:, i] > 0, d.copy_out[:, i], 0.0)
        _copy_out(s, ahead.pop(i, s.compute), copy, i)
        # Those nearer were issued by the blocks before.
        for depth in depths:
            if i - depth >= 0:
                issue(i - depth, rules.prefetch == depth)
        busy = np.maximum.reduce([s.gather, s.scatter, s.reduce])
        _compute(s, d.backward[:, i], busy, rules, "backward", i)
        _reduce(
            s, d.copy_in[:, i], d.scatter[:, i], d.reduce[:, i], rules, scatters, reduces, i
        )  # fmt: skip
        before = s.compute
        # Blocks of which all that are gathered ahead are equal too.
        skipped = watch.skip(i - deepest - runs[i][0])
        if skipped:
            moved = s.compute - before
            ahead = {j - skipped: t + moved for j, t in ahead.items()}
        i -= 1 + skipped
    _reduce(
        s, d.root_copy_in, d.root_scatter, d.root_reduce, rules, scatters, reduces, -1
    )  # fmt: skip


def _reduce(
    s: _Streams,
    copy_in: Floats,
    scatter: Floats,
    reduce: Floats,
    rules: Rules,
    scatters: Bools,
    reduces: Bools,
    block: int,
) -> None:
    """Copy gradients in, scatter, all-reduce."""
    copy = np.where(scatters, copy_in, 0.0)
    seconds = np.where(scatters, scatter, 0.0)
    moves = seconds > 0
    # The input buffer of the scatter before must have come back.
    s.compute = np.where(moves, np.maximum(s.compute, s.returned), s.compute) + copy
    s.copied = s.copied + copy
    s.record("copy", s.compute, copy, "copy in", block)
    free = np.where(rules.separate, s.scatter, np.maximum(s.gather, s.scatter))
    end = np.maximum(free, s.compute) + seconds
    s.scatter = np.where(moves, end, s.scatter)
    s.gather = np.where(moves & ~rules.separate, end, s.gather)
    s.moved = s.moved + seconds
    s.record("reduce-scatter", end, seconds, "reduce-scatter", block)
    across = np.where(reduces, reduce, 0.0)
    finished = _all_reduce(s, np.where(moves, s.scatter, s.compute), across, block)
    s.returned = np.where(moves, s.scatter, s.returned)
    done = np.maximum(np.where(moves, end, 0.0), np.where(across > 0, finished, 0.0))
    s.compute = np.where(rules.waits, np.maximum(s.compute, done), s.compute)


def _all_reduce(s: _Streams, ready: Floats, seconds: Floats, block: int) -> Floats:
    """Queue a reduction across replicas; returns when it is done."""
    finished: Floats = np.maximum(s.reduce, ready) + seconds
    s.reduce = np.where(seconds > 0, finished, s.reduce)
    s.moved = s.moved + seconds
    s.record("all-reduce", finished, seconds, "all-reduce", block)
    return finished
