"""The search against pricing everything."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise, product

import numpy as np
import pytest

from benchmarks.plan_speed import place_layouts
from shardwise.planning.batches import batches
from shardwise.planning.choice import WANTED_HEADROOM
from shardwise.planning.degrees import of_groups
from shardwise.planning.layout import Degrees, Layout
from shardwise.planning.placed import Forms
from shardwise.planning.price import price_alike, price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate, complexity
from shardwise.planning.search import Search
from shardwise.planning.space import Space, group_sizes, placements
from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import usable_bytes, verdict
from shardwise.predict.rates import comparison_error
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.strategy import Strategy


def problem(
    model: str, cluster: str, seq_len: int = 4096, global_batch: int | None = None
) -> Problem:
    job = Job(seq_len=seq_len, global_batch=global_batch)
    return Problem(find_model(model), find_cluster(cluster), job, Strategy(kind="zero3"))


def everything(asked: Problem, space: Space) -> list[Candidate]:
    """Every combination of every setting that fits."""
    units = Units(asked)
    sizes = batches(asked.job, asked.cluster, space.micro_batches)
    limit = usable_bytes(asked.cluster.device)
    accumulates = any(size.accumulate > 1 for size in sizes)
    every: dict[str, Strategy] = {}
    laid_out = placements(asked.cluster, asked.base, accumulates, space, split_root=units.can_split)
    for base, loss, (size, count, _), policy, ahead, forward, blocks, dtype in product(
        laid_out,
        space.losses,
        sizes,
        space.recompute,
        space.prefetch,
        space.forward_prefetch,
        space.blocks_per_unit,
        (asked.base.reduce_dtype, *space.reduce_dtypes),
    ):
        if count == 1 and base.sharded and base.grad_sync not in ("every", "local"):
            continue  # the same run as another kind
        strategy = base.but(micro_batch=size, accumulate=count, recompute=policy, loss=loss)
        if strategy.sharded:
            strategy = strategy.but(
                prefetch=ahead,
                forward_prefetch=forward,
                blocks_per_unit=blocks,
                reduce_dtype=dtype,
            )
        every[repr(strategy)] = strategy
    by_units: dict[int, list[Strategy]] = {}
    for strategy in every.values():
        by_units.setdefault(id(units.of(strategy)), []).append(strategy)
    found = [c for alike in by_units.values() for c in priced(asked, units, alike)]
    return [c for c in found if c.needed_bytes <= limit]


def priced(asked: Problem, units: Units, strategies: list[Strategy]) -> list[Candidate]:
    """Strategies that share units, priced at once; one of them is priced alone too."""
    candidates = price_alike(asked, units, strategies)
    alone = price_one(asked, units, strategies[-1])
    assert candidates[-1][1:] == pytest.approx(alone[1:])
    return candidates


SMALL = Space(
    recompute=("none", "selective", 0.5, "full"),
    micro_batches=(1, 2, 4),
    prefetch=(0, 1),
    forward_prefetch=(0, 1),
    blocks_per_unit=(1, 2),
    losses=("plain",),
    tensor=(1,),
    context=(1,),
)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("llama-3-8b", "2x4xA100-80GB@100Gbps", None),
        ("llama-3-8b", "2x4xA100-80GB@10Gbps", 8 * 4 * 4096),
        ("llama-2-13b", "8xH100-SXM", None),
        ("gpt2-xl", "2xA100-40GB", None),
    ],
)
def test_it_finds_what_pricing_everything_finds(
    model: str, cluster: str, batch: int | None
) -> None:
    """What it takes is the fastest of all but for what the rule calls equal."""
    asked = problem(model, cluster, 1024 if model == "gpt2-xl" else 4096, batch)
    # Accumulation has more ways to be laid out; fewer settings keep the test quick.
    space = SMALL if batch is None else SMALL._replace(recompute=("none", "full"), prefetch=(1,))
    found = Search(asked, space).run()
    grid = everything(asked, space)
    fastest = max(c.tokens_per_s for c in grid)
    best = found.best()
    assert best is not None
    assert best.tokens_per_s >= (1 - comparison_error()) ** 2 * fastest
    # Before ties are decided, nothing is lost but what the last pass did not look at.
    quickest = found.fastest()
    assert quickest is not None
    assert quickest.tokens_per_s >= 0.995 * fastest
    # The best of each layout is the best of that layout.
    for candidate in found.layouts():
        rivals = [c.tokens_per_s for c in grid if c.layout == candidate.layout]
        assert candidate.tokens_per_s >= (1 - comparison_error()) ** 2 * max(rivals)


def test_a_space_without_small_settings_is_searched_exactly() -> None:
    """Where there is nothing to refine, the search is brute force."""
    space = SMALL._replace(prefetch=(1,), forward_prefetch=(0,), blocks_per_unit=(1,))
    asked = problem("llama-3-8b", "2x4xA100-80GB@50Gbps")
    found, grid = Search(asked, space).run(), everything(asked, space)
    columns = found.table.columns
    ours = sorted(columns.tokens_per_s[columns.needed_bytes <= found.limit_bytes].tolist())
    assert ours == pytest.approx(sorted(c.tokens_per_s for c in grid), rel=1e-9)
    assert found.fitting == len(grid)


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        ("llama-3-70b", "64x8xH100-SXM@400Gbps"),
        ("llama-3-8b", "8xA100-40GB"),
        ("llama-3.1-405b", "512x8xH100-SXM@400Gbps"),
        ("gpt2-xl", "1xA100-40GB"),
    ],
)
def test_it_never_returns_what_does_not_fit(model: str, cluster: str) -> None:
    asked = problem(model, cluster, 1024 if model == "gpt2-xl" else 4096)
    found = Search(asked).run()
    best = found.best()
    assert best is not None
    shown = [best, *found.layouts(), *found.lower_memory(best)]
    assert any(shown)
    for candidate in shown:
        if candidate is not None:
            pooled = round(candidate.needed_bytes - candidate.peak_bytes)
            judged = verdict(round(candidate.peak_bytes), asked.cluster.device, pooled)
            assert judged == "fits"
            again = price_one(asked, Units(asked), candidate.strategy)
            assert again.tokens_per_s == pytest.approx(candidate.tokens_per_s, rel=1e-9)
            assert again.peak_bytes == pytest.approx(candidate.peak_bytes, rel=1e-9)


def test_the_front_trades_speed_for_memory() -> None:
    found = Search(problem("llama-3-8b", "8x8xH100-SXM@400Gbps")).run()
    best = found.best()
    assert best is not None
    front = [best, *found.lower_memory(best)]
    assert len(front) >= 3
    sizes = [c.needed_bytes for c in front]
    assert sizes == sorted(sizes, reverse=True)
    # Ties may move neighbours, no more.
    speeds = [c.tokens_per_s for c in front]
    assert all(a >= (1 - comparison_error()) * b for a, b in pairwise(speeds))
    assert speeds[0] > speeds[-1]


def test_groups_are_whole_nodes_or_parts_of_one() -> None:
    assert group_sizes(find_cluster("4x8xH100-SXM@400Gbps")) == [32, 16, 8, 4, 2]
    assert group_sizes(find_cluster("3x8xH100-SXM@400Gbps")) == [24, 8, 4, 2]
    assert group_sizes(find_cluster("6xA100-80GB")) == [6, 3]


def test_simple_is_counted_by_what_one_has_to_know() -> None:
    ddp = Strategy(kind="ddp").resolve(8, 8)
    zero2, zero3 = (Strategy(kind=kind).resolve(8, 8) for kind in ("zero2", "zero3"))
    hybrid = Strategy(kind="zero3", shard=4).resolve(8, 8)
    scores = [complexity(s, "none", False) for s in (ddp, zero3)]
    scores += [complexity(hybrid, "full", False), complexity(hybrid, 0.5, False)]
    assert scores == sorted(set(scores))
    assert complexity(zero2, "none", False) == complexity(zero3, "none", False)
    assert complexity(hybrid, "none", False) == complexity(zero3, "none", False)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [("llama-3-70b", "64x8xH100-SXM@400Gbps", 2**22), ("llama-3-8b", "8xA100-40GB", None)],
)
def test_headroom_decides_only_among_equals(model: str, cluster: str, batch: int | None) -> None:
    """Of all rows: nothing with as much headroom is faster by more than the error."""
    found = Search(problem(model, cluster, 4096, batch)).run()
    best = found.best()
    assert best is not None
    columns = found.table.columns
    closest = columns.distance <= columns.distance.min() + 1e-9
    rivals = closest & (columns.needed_bytes <= found.limit_bytes)
    roomy = rivals & (columns.needed_bytes <= (1 - WANTED_HEADROOM) * found.limit_bytes)
    least = (1 - comparison_error()) * columns.tokens_per_s[rivals].max()
    assert found.is_tight(best) == (columns.tokens_per_s[roomy].max() < least)
    among = rivals if found.is_tight(best) else roomy
    assert best.tokens_per_s >= (1 - comparison_error()) * columns.tokens_per_s[among].max()


def test_what_a_stack_cannot_express_is_never_priced() -> None:
    def flat(strategy: Strategy) -> bool:
        whole = strategy.recompute in ("none", "full")
        return strategy.kind == "zero3" and not strategy.hybrid and whole

    space = Space(allowed=flat, prefetch=(1,), blocks_per_unit=(1,))
    found = Search(problem("llama-3-8b", "2x8xH100-SXM@400Gbps"), space).run()
    assert {layout.kind for layout in found.table.layouts} == {"zero3"}
    assert {layout.mesh.replicate for layout in found.table.layouts} == {1}
    rows = (found.table.candidate(index).strategy for index in range(len(found.table)))
    assert {strategy.recompute for strategy in rows} == {"none", "full"}
    assert found.best() is not None


DEGREES = [
    *(Degrees(tensor, context) for tensor in (1, 2, 8) for context in (1, 2)),
    *(Degrees(context=4, ring=True), Degrees(2, 2, ring=True)),
    *(Degrees(expert=expert) for expert in (2, 4, 16, 64)),
]


@pytest.mark.parametrize("cluster", ["8xH100-SXM", "2x8xH100-SXM@400Gbps", "6x8xH100-SXM@400Gbps"])
@pytest.mark.parametrize(
    "base",
    [Strategy(kind="zero3"), Strategy(kind="ddp", compress="bf16"),
     Strategy(kind="zero3", linear_dtype="fp8", low_bit_gather=True)],
)  # fmt: skip
def test_placements_as_columns_are_checked_strategies(cluster: str, base: Strategy) -> None:
    whole, forms, space = find_cluster(cluster), Forms(), Space()
    for degrees, accumulates in product(DEGREES, (False, True)):
        if whole.devices % degrees.inner:
            continue
        groups = of_groups(whole, degrees.inner)
        # A space of a stack has every strategy resolved and checked by itself.
        each = space._replace(applied=lambda strategy: strategy)
        alone = placements(groups, base, accumulates, each, degrees=degrees)
        found = placements(groups, base, accumulates, space, degrees=degrees, forms=forms)
        assert list(found) == list(alone)
        assert [found.layout(row) for row in range(len(found))] == list(map(Layout.of, alone))
        if len(found):
            for column in fields(Configurations):
                wanted = getattr(Configurations.of(list(alone)), column.name)
                assert np.array_equal(getattr(found.columns, column.name), wanted), column.name


def test_strategies_are_made_of_forms_and_not_of_every_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = 0
    read = Strategy.read

    def counted(*given: object, **named: object) -> Strategy:
        nonlocal checked
        checked += 1
        return read(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Strategy, "read", counted)
    layouts, _ = place_layouts(5000)
    assert layouts >= 5000
    assert checked < 1000
