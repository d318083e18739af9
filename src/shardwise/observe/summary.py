"""Summary of the traces of a run, one per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.observe.rank.summary import RankSummary, summarise_rank
from shardwise.observe.ranks import JoinedCollectives, join_collectives
from shardwise.observe.rules import Rules
from shardwise.observe.run_folder import logged_rank_load
from shardwise.spec.record import SpecError

# Total bytes above which several processes are faster than one.
_MIN_BYTES_FOR_PROCESSES = 20_000_000


class Summary(NamedTuple):
    """The ranks of a run, ordered by number.

    `joined` is None for a single rank, or if no collective could be matched across ranks.
    `rank_load` is that of the run's metrics: tokens of the busiest rank over the mean, None where
    it was not logged.
    """

    ranks: list[RankSummary]
    joined: JoinedCollectives | None
    rank_load: float | None = None


def summarise(
    paths: list[Path],
    rules: Rules | None = None,
    *,
    timelines: bool = False,
    cache: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Read traces in parallel, keeping only the summary of each; raise SpecError with all problems.

    `timelines` keeps their timelines too; `progress` is called with the number of traces read.
    """
    read = partial(_read, rules=rules, timeline=timelines, cache=cache)
    ranks, problems = [], []
    for number, result in enumerate(_map_files(read, paths), 1):
        if isinstance(result, RankSummary):
            ranks.append(result)
        else:
            problems += result
        if progress is not None:
            progress(number)
    if problems:
        raise SpecError(problems)
    ranks.sort(key=_sort_key)
    _check_ranks(ranks)
    joined = join_collectives([rank.calls for rank in ranks]) if len(ranks) > 1 else None
    if joined is not None and not joined.collectives:
        joined = None
    return Summary(ranks, joined, logged_rank_load(ranks[0].path))


def _read(
    path: Path, rules: Rules | None, timeline: bool, cache: Path | None
) -> RankSummary | list[str]:
    """The summary of a trace, or its problems, so that all files can be checked at once."""
    try:
        return summarise_rank(path, rules, timeline=timeline, cache=cache)
    except SpecError as error:
        return error.problems


def _map_files(
    read: Callable[[Path], RankSummary | list[str]], paths: list[Path]
) -> Iterator[RankSummary | list[str]]:
    """Apply `read` to each path, in several processes if the files are large."""
    workers = min(len(paths), os.cpu_count() or 1)
    if workers < 2 or sum(map(_size, paths)) < _MIN_BYTES_FOR_PROCESSES:
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
    """Bytes of a file; 0 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it reports the problem


def _sort_key(rank: RankSummary) -> tuple[int, str]:
    """Key that sorts ranks by number, then files without a rank by path."""
    return (rank.rank if rank.rank is not None else 2**31, str(rank.path))


def _check_ranks(ranks: list[RankSummary]) -> None:
    """Raise SpecError if two traces are of the same rank."""
    seen = [r.rank for r in ranks if r.rank is not None]
    if len(set(seen)) < len(seen):
        twice = sorted({rank for rank in seen if seen.count(rank) > 1})
        raise SpecError(
            f"trace: several files are of rank {twice[0]}; give one file per rank of one run"
        )
