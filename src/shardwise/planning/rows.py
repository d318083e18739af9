"""Configurations of a search as columns, one row each, and the strategy of any row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.planning.batches import Batch, distance
from shardwise.planning.layout import Layout
from shardwise.planning.placed import Placed
from shardwise.planning.space import Recompute
from shardwise.predict.configurations import Bools, Configurations, Floats, Ints
from shardwise.predict.time import Times
from shardwise.spec.job import Job
from shardwise.spec.quantity import show_count, show_gib
from shardwise.spec.recompute import show_recompute
from shardwise.spec.strategy import Strategy


def complexity(strategy: Strategy, recompute: Recompute, accumulates: bool) -> int:
    """Number of unusual settings of a configuration; parallelism and risky ones count twice."""
    usual = ("every", "local") if strategy.kind != "zero1" else ("last",)
    return sum(
        (
            strategy.sharded,
            accumulates,
            strategy.kind == "zero1",
            not isinstance(strategy.reshard_after_forward, bool),
            strategy.sharded and strategy.grad_sync not in usual and accumulates,
            recompute != "none",
            isinstance(recompute, float),
            strategy.prefetch != 1,
            strategy.forward_prefetch != 0,
            strategy.blocks_per_unit != 1,
            strategy.loss != "plain",
            2 * (strategy.tensor > 1),
            2 * (strategy.context > 1),
            2 * (strategy.expert > 1),
            2 * (strategy.reduce_dtype != "fp32"),
            2 * bool(strategy.offload),
        )
    )


def _differ_by_accumulation(placed: Placed) -> Bools:
    """By row, whether it differs from another one only if gradients accumulate."""
    usual = placed.by_form(lambda s: s.grad_sync == ("local" if s.hybrid else "every"))
    sharded = placed.by_form(lambda s: s.sharded)
    resharded = [one.reshard_after_forward is not False for one in placed.forms]
    keys = [
        (place.mesh, place.reshard, resharded[form])
        for place, form in zip(placed.places, placed.form.tolist(), strict=True)
    ]
    reduced_at_once = {key for key, kept in zip(keys, usual.tolist(), strict=True) if kept}
    also = np.asarray([key in reduced_at_once for key in keys], dtype=np.bool_)
    redundant: Bools = sharded & ~usual & also
    return redundant


class Rows(NamedTuple):
    """Configurations that share model units: a strategy, a batch and a recompute policy each.

    By row, `which` is an index into `strategies` and `policy` an index into `policies`.
    """

    strategies: Placed
    policies: Sequence[Recompute]
    which: Ints
    policy: Ints
    complexity: Ints
    columns: Configurations

    @classmethod
    def product(
        cls,
        strategies: Sequence[Strategy],
        sizes: Sequence[Batch],
        policies: Sequence[Recompute],
        allowed: Callable[[Strategy], bool] | None = None,
    ) -> Rows:
        """One row for each strategy with each batch and each policy, if `allowed`.

        Strategies that differ only in accumulation are left out where there is one micro-batch.
        """
        placed = Placed.of(strategies)
        shape = (len(placed), len(sizes), len(policies))
        which, size, policy = (axis.ravel() for axis in np.indices(shape))
        columns = placed.columns.take(which)
        columns.micro_batch = np.asarray([s.micro_batch for s in sizes], dtype=np.int64)[size]
        columns.accumulate = np.asarray([s.accumulate for s in sizes], dtype=np.int64)[size]
        shares = [p if isinstance(p, float) else float(p == "full") for p in policies]
        columns.full_recompute = np.asarray(shares)[policy]
        columns.selective = np.asarray([p == "selective" for p in policies])[policy]
        accumulates = (columns.accumulate > 1).astype(int)
        simplicity = np.asarray(
            [
                [[complexity(s, p, many) for many in (False, True)] for p in policies]
                for s in placed.forms
            ]
        )
        score = simplicity[placed.form[which], policy, accumulates]
        rows = cls(placed, policies, which, policy, score, columns)
        kept = (accumulates == 1) | ~_differ_by_accumulation(placed)[which]
        if allowed is not None:
            expressible = np.asarray(
                [
                    [[allowed(s.but(recompute=p, accumulate=n)) for n in (1, 2)] for p in policies]
                    for s in placed
                ]
            )
            kept &= expressible[which, policy, accumulates]
        return rows.take(np.flatnonzero(kept))

    def take(self, kept: Ints) -> Rows:
        """The rows with these indices."""
        return self._replace(
            which=self.which[kept],
            policy=self.policy[kept],
            complexity=self.complexity[kept],
            columns=self.columns.take(kept),
        )

    @classmethod
    def one_per_strategy(cls, strategies: Sequence[Strategy]) -> Rows:
        """One row for each strategy, with its own batch and recompute policy."""
        policies = list(dict.fromkeys(s.recompute for s in strategies))
        policy = np.asarray([policies.index(s.recompute) for s in strategies], dtype=np.int64)
        which = np.arange(len(strategies))
        score = np.asarray(
            [complexity(s, s.recompute, s.accumulate > 1) for s in strategies], dtype=np.int64
        )
        placed = Placed.of(strategies)
        return cls(placed, policies, which, policy, score, placed.columns)

    def strategy(self, row: int) -> Strategy:
        """The full strategy of a row, with its batch and recompute policy."""
        base = self.strategies[int(self.which[row])]
        return base.but(
            micro_batch=int(self.columns.micro_batch[row]),
            accumulate=int(self.columns.accumulate[row]),
            recompute=self.policies[self.policy[row]],
        )


class Candidate(NamedTuple):
    """One configuration with its predicted memory per device and time per step."""

    strategy: Strategy
    # Tensors at the peak; and with allocator overhead, which a device must have room for.
    peak_bytes: float
    needed_bytes: float
    tokens_per_s: float
    step_s: float
    compute_s: float
    copy_s: float
    exposed_s: float
    optimizer_s: float

    def __repr__(self) -> str:
        s = self.strategy
        return (
            f"Candidate({s}, micro-batch {s.micro_batch} × {s.accumulate}, recompute "
            f"{show_recompute(s.recompute)}: {show_count(self.tokens_per_s)} tokens/s, "
            f"{show_gib(self.needed_bytes)})"
        )

    @property
    def layout(self) -> Layout:
        return Layout.of(self.strategy)

    def to_dict(self) -> dict[str, Any]:
        strategy = self.strategy.model_dump(mode="json", exclude={"within_node"})
        sizes = {"peak_bytes": round(self.peak_bytes), "needed_bytes": round(self.needed_bytes)}
        return {**self._asdict(), **sizes, "strategy": strategy}


class Columns(NamedTuple):
    """The predicted figures of all rows of a table, one array per quantity."""

    # Index of the `Rows` a row comes from, and its index in that.
    source: Ints
    row: Ints
    layout: Ints
    complexity: Ints
    # Relative distance of the tokens per step from the requested global batch.
    distance: Floats
    peak_bytes: Floats
    needed_bytes: Floats
    tokens_per_s: Floats
    step_s: Floats
    compute_s: Floats
    copy_s: Floats
    exposed_s: Floats
    optimizer_s: Floats


class Table:
    """All configurations that a search has timed, one row each, from several `Rows`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sources: list[Rows] = []
        self._layouts: dict[Layout, int] = {}
        self._parts: list[Columns] = []

    def add(self, rows: Rows, peak: Floats, needed: Floats, times: Times) -> None:
        """Add rows with their memory (bytes per device) and times."""
        c = rows.columns
        sequences = c.micro_batch * c.accumulate
        tokens = sequences * c.data_parallel * float(self._job.seq_len)
        numbers = {
            index: self._layouts.setdefault(rows.strategies.layout(index), len(self._layouts))
            for index in sorted(set(rows.which.tolist()))
        }
        self._parts.append(
            Columns(
                source=np.full(len(needed), len(self._sources)),
                row=np.arange(len(needed)),
                layout=np.asarray([numbers[index] for index in rows.which.tolist()]),
                complexity=rows.complexity,
                distance=distance(sequences, c.data_parallel, self._job),
                peak_bytes=peak,
                needed_bytes=needed,
                tokens_per_s=tokens / times.step_s,
                step_s=times.step_s,
                compute_s=times.compute_s,
                copy_s=times.copy_s,
                exposed_s=times.exposed_communication_s,
                optimizer_s=times.optimizer_s,
            )
        )
        self._sources.append(rows)

    def __len__(self) -> int:
        return sum(len(part.row) for part in self._parts)

    @property
    def columns(self) -> Columns:
        if not self._parts:
            whole, real = np.empty(0, dtype=np.int64), np.empty(0)
            empty: list[Any] = [whole] * 4 + [real] * (len(Columns._fields) - 4)
            return Columns(*empty)
        if len(self._parts) > 1:
            joined: list[Any] = [np.concatenate(c) for c in zip(*self._parts, strict=True)]
            self._parts = [Columns(*joined)]
        return self._parts[0]

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of all rows, in the order they were added; `Columns.layout` indexes these."""
        return list(self._layouts)

    def placement(self, index: int) -> tuple[int, int, int]:
        """A key that is equal for rows that differ only in their batch."""
        columns = self.columns
        source, row = int(columns.source[index]), int(columns.row[index])
        rows = self._sources[source]
        return source, int(rows.which[row]), int(rows.policy[row])

    def policy(self, index: int) -> Recompute:
        """The recompute policy of a row."""
        rows = self._sources[int(self.columns.source[index])]
        return rows.policies[int(rows.policy[int(self.columns.row[index])])]

    def candidate(self, index: int) -> Candidate:
        """The configuration of a row, with its predicted figures."""
        columns = self.columns
        rows = self._sources[int(columns.source[index])]
        return Candidate(
            strategy=rows.strategy(int(columns.row[index])),
            peak_bytes=float(columns.peak_bytes[index]),
            needed_bytes=float(columns.needed_bytes[index]),
            tokens_per_s=float(columns.tokens_per_s[index]),
            step_s=float(columns.step_s[index]),
            compute_s=float(columns.compute_s[index]),
            copy_s=float(columns.copy_s[index]),
            exposed_s=float(columns.exposed_s[index]),
            optimizer_s=float(columns.optimizer_s[index]),
        )
