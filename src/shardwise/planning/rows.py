"""Configurations by the thousand: columns to price, and the strategy behind any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.planning.space import Recompute
from shardwise.predict.configurations import Configurations, Floats, Ints
from shardwise.predict.simulate import Times
from shardwise.spec.quantity import show_count, show_gib
from shardwise.spec.strategy import Strategy, show_recompute


def complexity(strategy: Strategy, recompute: Recompute, accumulates: bool) -> int:
    """How many things a person has to know to understand a configuration."""
    usual = ("every", "local") if strategy.kind != "zero1" else ("last",)
    return sum(
        (
            strategy.sharded,
            strategy.hybrid,
            strategy.kind == "zero1",
            not isinstance(strategy.reshard_after_forward, bool),
            strategy.sharded and strategy.grad_sync not in usual and accumulates,
            recompute != "none",
            isinstance(recompute, float),
            strategy.prefetch != 1,
            strategy.forward_prefetch != 0,
            strategy.blocks_per_unit != 1,
            2 * (strategy.reduce_dtype != "fp32"),
            2 * strategy.offload,
        )
    )


class Rows(NamedTuple):
    """Rows that share units: which strategy, with which batch and which recomputation."""

    strategies: Sequence[Strategy]
    policies: Sequence[Recompute]
    which: Ints
    policy: Ints
    columns: Configurations

    @classmethod
    def product(
        cls,
        strategies: Sequence[Strategy],
        sizes: Sequence[tuple[int, int]],
        policies: Sequence[Recompute],
        allowed: Callable[[Strategy], bool] | None = None,
    ) -> Rows:
        """Each strategy with each micro-batch and accumulation and each policy, if `allowed`."""
        shape = (len(strategies), len(sizes), len(policies))
        which, size, policy = (axis.ravel() for axis in np.indices(shape))
        columns = Configurations.of(strategies).take(which)
        pairs = np.asarray(sizes, dtype=np.int64)
        columns.micro_batch, columns.accumulate = pairs[size, 0], pairs[size, 1]
        shares = [p if isinstance(p, float) else float(p == "full") for p in policies]
        columns.full_recompute = np.asarray(shares)[policy]
        columns.selective = np.asarray([p == "selective" for p in policies])[policy]
        if allowed is not None:
            expressible = np.asarray(
                [
                    [
                        [allowed(s.but(recompute=p, accumulate=steps)) for steps in (1, 2)]
                        for p in policies
                    ]
                    for s in strategies
                ]
            )
            accumulates = (columns.accumulate > 1).astype(int)
            kept = np.flatnonzero(expressible[which, policy, accumulates])
            which, policy, columns = which[kept], policy[kept], columns.take(kept)
        return cls(strategies, policies, which, policy, columns)

    @classmethod
    def each(cls, strategies: Sequence[Strategy]) -> Rows:
        """These strategies as they are."""
        policies = list(dict.fromkeys(s.recompute for s in strategies))
        policy = np.asarray([policies.index(s.recompute) for s in strategies], dtype=np.int64)
        which = np.arange(len(strategies))
        return cls(strategies, policies, which, policy, Configurations.of(strategies))

    def complexity(self) -> Ints:
        """Of every row."""
        table = np.asarray(
            [
                [[complexity(s, p, many) for many in (False, True)] for p in self.policies]
                for s in self.strategies
            ]
        )
        found: Ints = table[self.which, self.policy, (self.columns.accumulate > 1).astype(int)]
        return found

    def strategy(self, row: int) -> Strategy:
        base: Strategy = self.strategies[int(self.which[row])]
        return base.but(
            micro_batch=int(self.columns.micro_batch[row]),
            accumulate=int(self.columns.accumulate[row]),
            recompute=self.policies[self.policy[row]],
        )


class Candidate(NamedTuple):
    """One configuration and what it takes."""

    strategy: Strategy
    # Of tensors; and with the pools the allocator keeps, which a device must have room for.
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
    def layout(self) -> str:
        return str(self.strategy)

    def to_dict(self) -> dict[str, Any]:
        strategy = self.strategy.model_dump(mode="json", exclude={"within_node"})
        sizes = {"peak_bytes": round(self.peak_bytes), "needed_bytes": round(self.needed_bytes)}
        return {**self._asdict(), **sizes, "strategy": strategy}


class Table:
    """Everything that was priced, one row each, from several sets of rows."""

    def __init__(self) -> None:
        self._sets: list[tuple[Rows, Ints]] = []
        self._layouts: dict[str, int] = {}
        self._columns: list[Floats] = []

    def add(
        self, rows: Rows, kept: Ints, peak: Floats, needed: Floats, times: Times, seq_len: int
    ) -> None:
        c = rows.columns.take(kept)
        tokens = c.micro_batch * c.accumulate * c.shard * c.replicate * float(seq_len)
        names = [self._layouts.setdefault(str(s), len(self._layouts)) for s in rows.strategies]
        layout = np.asarray(names)[rows.which[kept]]
        whose = np.full(len(kept), len(self._sets))
        seconds = (
            *(times.step_s, times.compute_s, times.copy_s),
            *(times.exposed_communication_s, times.optimizer_s),
        )
        speed = tokens / times.step_s
        self._sets.append((rows, kept))
        self._columns.append(
            np.stack(
                [
                    *(whose, np.arange(len(kept)), layout, rows.complexity()[kept]),
                    *(peak, needed, speed, *seconds),
                ]
            ).astype(float)
        )

    def __len__(self) -> int:
        return sum(part.shape[1] for part in self._columns)

    @property
    def columns(self) -> Floats:
        if len(self._columns) > 1:
            self._columns = [np.concatenate(self._columns, axis=1)]
        return self._columns[0] if self._columns else np.empty((12, 0))

    @property
    def layout(self) -> Floats:
        return np.asarray(self.columns[2])

    @property
    def layouts(self) -> list[str]:
        return list(self._layouts)

    @property
    def complexity(self) -> Floats:
        return np.asarray(self.columns[3])

    @property
    def needed_bytes(self) -> Floats:
        return np.asarray(self.columns[5])

    @property
    def tokens_per_s(self) -> Floats:
        return np.asarray(self.columns[6])

    def candidate(self, index: int) -> Candidate:
        whose, row, _, _, *figures = self.columns[:, index].tolist()
        rows, kept = self._sets[int(whose)]
        return Candidate(rows.strategy(int(kept[int(row)])), *figures)
