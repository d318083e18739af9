"""Several files: kept as Parquet, read by several processes, the same either way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.observe import summary as reading
from shardwise.observe.file.cache import cached_trace
from shardwise.observe.file.trace import read_trace
from shardwise.observe.summary import summarise
from shardwise.spec.record import SpecError
from tests.observe.synthetic import Plan, build

PLAN = Plan(ranks=3, blocks=4, steps=2)


def test_what_was_kept_is_what_was_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (path, *_) = build(tmp_path / "traces", PLAN).paths
    cache = tmp_path / "cache"
    plain, kept, again = read_trace(path), cached_trace(path, cache), cached_trace(path, cache)
    assert len(list(cache.iterdir())) == 1
    for trace in (kept, again):
        for name in ("start_ns", "end_ns", "correlation", "collective_row", "group_size", "name"):
            assert getattr(trace, name).tolist() == getattr(plain, name).tolist()
            assert getattr(trace, name).dtype == getattr(plain, name).dtype
        assert (trace.texts, trace.about, trace.shapes) == (plain.texts, plain.about, plain.shapes)


def test_a_changed_or_broken_entry_is_made_anew(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path, other, _ = build(tmp_path / "traces", PLAN).paths
    cache = tmp_path / "cache"
    cached_trace(path, cache)
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(1, 1))
    assert cached_trace(path, cache).rank == 1
    for kept in cache.iterdir():
        kept.write_bytes(b"PAR1 no more")
    assert cached_trace(path, cache).rank == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="--cache: cannot write"):
        cached_trace(path, tmp_path / "file" / "below")


def test_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = build(tmp_path, PLAN, offset=500).paths
    alone = summarise(paths)
    monkeypatch.setattr(reading, "_MIN_BYTES_FOR_PROCESSES", 0)
    done: list[int] = []
    together = summarise(list(reversed(paths)), progress=done.append)
    assert done == [1, 2, 3]
    assert [rank.rank for rank in together.ranks] == [0, 1, 2]
    for one, other in zip(alone.ranks, together.ranks, strict=True):
        assert (one.full_trace, one.units, one.host) == (other.full_trace, other.units, other.host)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SpecError, match="no list of trace events"):
        summarise([*paths, tmp_path / "broken.json"])


def test_groups_that_are_not_the_whole_world_are_joined_by_their_members(tmp_path: Path) -> None:
    """Ranks 0, 1 and 2, 3 gather among themselves; all four reduce. Nobody is matched across."""
    paths = []
    for rank in range(4):
        first = rank // 2 * 2
        events = []
        for number in range(3):
            # Rank 1 is late by 30 in its pair's gathers, which begin at other times than the rest.
            begin = 100 + 200 * number + 40 * (rank // 2)
            late = 30 if rank == 1 else 0
            for name, group, start, end in (
                ("AllGather", [first, first + 1], begin + late, begin + 50),
                ("AllReduce", [0, 1, 2, 3], begin + 60 + 5 * rank, 300 + 200 * number),
            ):
                args = {"device": 0, "stream": 20, "correlation": -1, "Collective name": name,
                        "Process Group Name": name + str(group[0]), "Group size": len(group),
                        "Process Group Ranks": str(group)}  # fmt: skip
                events.append({"ph": "X", "cat": "kernel", "name": f"nccl{name}", "pid": 0,
                               "tid": 20, "ts": start, "dur": end - start,
                               "args": args})  # fmt: skip
        path = tmp_path / f"r{rank}.json"
        path.write_text(json.dumps({"distributedInfo": {"rank": rank, "world_size": 4},
                                    "traceEvents": events}))  # fmt: skip
        paths.append(path)
    joined = summarise(paths).joined
    assert joined is not None
    assert joined.collectives == 3 * (2 + 1)
    assert joined.unmatched == [0, 0, 0, 0]
    # The pair 0, 1 moves for 20 at a time, the pair 2, 3 for 50; rank 3 begins reductions last.
    first = 300 - (100 + 60 + 40 + 15)
    assert joined.transfer_ns == 3 * (20 + 50 + first) * 1000
    # Ranks 2 and 3 begin their gathers together: nobody is late.
    assert joined.last_to_arrive().tolist() == [0, 3, 0, 3]
