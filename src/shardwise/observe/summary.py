"""What the traces of a run say together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.observe.rank.summary import RankSummary, summarise_rank
from shardwise.observe.ranks import Joined, join
from shardwise.observe.rules import Rules
from shardwise.spec.record import SpecError

# Files smaller than this together are read sooner than processes are started.
_WORTH_PROCESSES = 20_000_000


class Summary(NamedTuple):
    """One or more ranks of a run."""

    ranks: list[RankSummary]
    joined: Joined | None


def summarise(
    paths: list[Path],
    rules: Rules | None = None,
    *,
    timelines: bool = False,
    cache: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Read traces, one process per core where that pays; of each only what is needed is kept.

    `progress` is told how many are done.
    """
    read = partial(summarise_rank, rules=rules, timeline=timelines, cache=cache)
    ranks = []
    for rank in _each(read, paths):
        ranks.append(rank)
        if progress is not None:
            progress(len(ranks))
    ranks.sort(key=_order)
    _check_ranks(ranks)
    joined = join([rank.calls for rank in ranks]) if len(ranks) > 1 else None
    return Summary(ranks, joined if joined is not None and joined.collectives else None)


def _each(read: Callable[[Path], RankSummary], paths: list[Path]) -> Iterator[RankSummary]:
    workers = min(len(paths), os.cpu_count() or 1)
    if workers < 2 or sum(map(_size, paths)) < _WORTH_PROCESSES:
        yield from map(read, paths)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers) as pool:
        try:
            yield from pool.map(read, paths)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it will say what is wrong


def _order(rank: RankSummary) -> tuple[int, str]:
    return (rank.rank if rank.rank is not None else 2**31, str(rank.path))


def _check_ranks(ranks: list[RankSummary]) -> None:
    seen = [r.rank for r in ranks if r.rank is not None]
    if len(set(seen)) < len(seen):
        twice = sorted({rank for rank in seen if seen.count(rank) > 1})
        raise SpecError(f"trace: rank {twice[0]} is given more than once; give one file per rank")
