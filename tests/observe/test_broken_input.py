"""Broken traces: a sentence, or a partial answer that says what is missing; never a traceback."""

from __future__ import annotations

import gzip
import json
import math
import os
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rich.console import Console

from shardwise.observe.analysis import read_traces
from shardwise.observe.diagnosis.verdicts import verdicts_of
from shardwise.observe.file.stream import CHUNK, read_chunks
from shardwise.observe.file.trace import read_trace
from shardwise.observe.summary import Summary, summarise
from shardwise.report.trace import print_trace
from shardwise.spec.record import SpecError
from tests.examples import examples
from tests.observe.small import EVENTS, TRACE, event


def summary_of(path: Path) -> Summary:
    """Of a file that must be readable, or at least tell why it is not."""
    found = summarise([path], timelines=True)
    for rank in found.ranks:
        whole = rank.full_trace
        assert sum(whole[:4]) == whole.window_ns
        assert all(part >= 0 for part in whole)
        assert whole.overlap is None or (math.isfinite(whole.overlap) and 0 <= whole.overlap <= 1)
        assert all(part >= 0 for part in rank.host.idle)
    found_causes = verdicts_of(found)
    assert all(math.isfinite(v.saves_ns) and v.saves_ns >= 0 for v in found_causes)
    screen = StringIO()
    print_trace(read_traces([path]), console=Console(file=screen, width=80))
    assert "nan" not in screen.getvalue().lower()
    return found


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_any_layout_reads_the_same(
    tmp_path: Path, indent: int | None, compressed: bool, first: bool
) -> None:
    """Indented or not, compressed or not, the events first or last, or a bare list."""
    ordered = dict(sorted(TRACE.items(), key=lambda item: (item[0] == "traceEvents") != first))
    text = json.dumps(ordered, indent=indent).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if compressed else text)
    (rank,) = summary_of(path).ranks
    assert rank.rank == 0
    assert not rank.problems
    assert rank.full_trace.window_ns == 135_000
    assert rank.full_trace.compute_ns == 75_500
    assert rank.full_trace.overlapped_ns == 30_000
    assert rank.collectives[0].operation == "all-gather"
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(EVENTS, indent=indent))
    assert summary_of(bare).ranks[0].full_trace == rank.full_trace


def test_many_small_pieces_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the pieces a file comes in."""
    events = [event(f"k{i % 7}", i * 10.0, 5.0, note={"deep": [{"a": 1}, {"b": 2}]})
              for i in range(500)]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    whole = read_trace(path)
    for size in (64, 257, 1000, 4096):
        monkeypatch.setattr("shardwise.observe.file.stream.CHUNK", size)
        again = read_trace(path)
        assert again.start_ns.tolist() == whole.start_ns.tolist()
        assert [again.texts[n] for n in again.name] == [whole.texts[n] for n in whole.name]


def test_what_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [event("gemm", i * 10.0, 5.0) for i in range(2000)]}).encode()
    plain, packed = tmp_path / "cut.json", tmp_path / "cut.json.gz"
    plain.write_bytes(text[: len(text) // 2])
    packed.write_bytes(gzip.compress(text)[: len(gzip.compress(text)) // 2])
    for path in (plain, packed):
        (rank,) = summary_of(path).ranks
        assert any("truncated" in problem for problem in rank.problems)
        assert rank.timeline is not None
        assert 0 < len(rank.timeline) < 2000


def test_what_would_fill_the_memory_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB of one event, of spaces and of nested values, each in a small file.

    How much memory that takes is measured by the hostile calls, in processes of their own.
    """
    good = json.dumps(event("gemm", 0.0, 5.0)).encode() + b","
    path = tmp_path / "bomb.json.gz"
    for start, endless in [(b'{"ph":"X","args":[', b'{"a":1},'), (b"", b" "),
                           (b'{"name":"', b"a")]:  # fmt: skip
        text = endless * (20_000_000 // len(endless))
        path.write_bytes(gzip.compress(b'{"traceEvents": [' + good * 5 + start + text, 1))
        trace = read_trace(path)
        assert 4 <= len(trace) <= 5
        assert trace.problems
    assert trace.problems == ["an event is too long or malformed; only the part before it was read"]
    # All of it is read, in chunks that a reader holds one at a time.
    assert max(map(len, read_chunks(path, []))) <= 4 * CHUNK
    monkeypatch.setattr("shardwise.observe.file.stream.ALWAYS_BYTES", 1 << 22)
    problems: list[str] = []
    assert sum(map(len, read_chunks(path, problems))) <= 100 * path.stat().st_size + (1 << 22)
    assert "more than 100 times" in problems[0]
    # Many events, each of them good.
    path.write_bytes(b'{"traceEvents": [' + good * 20_000)
    monkeypatch.setattr("shardwise.observe.file.trace.MAX_BYTES", 1 << 19)
    monkeypatch.setattr("shardwise.observe.file.trace.MAX_GROWTH", 0)
    trace = read_trace(path)
    assert 5_000 < len(trace) < 20_000
    assert "more than 0 MiB" in trace.problems[0]


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(SpecError, match=r"cannot read .*trace\.json: .* not a regular file"):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no list of trace events"),
        (b"hello", "no list of trace events"),
        (b"{}", "no list of trace events"),
        (b'{"traceEvents": []}', "no event has a duration"),
        (b'{"traceEvents": [1, 2, "x"]}', "list of events cannot be read"),
        (b"\x1f\x8bnot gzip at all", "corrupt"),
    ],
)
def test_nothing_to_read_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        summarise([path])
    assert len(caught.value.problems) == 1
    assert said in caught.value.problems[0]


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read .*missing.json: No such file"):
        summarise([tmp_path / "missing.json"])


def test_negative_and_missing_times_are_left_out_and_told(tmp_path: Path) -> None:
    odd = [{**EVENTS[0], "dur": -5.0}, {**EVENTS[0], "dur": None},
           {k: v for k, v in EVENTS[0].items() if k != "dur"}]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**TRACE, "traceEvents": [*EVENTS, *odd]}))
    (rank,) = summary_of(path).ranks
    (problem,) = rank.problems
    assert problem.startswith("3 events without a valid time")
    assert rank.full_trace.compute_ns == 75_500


def test_no_communication_where_there_should_be_some_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**TRACE, "traceEvents": [EVENTS[0], EVENTS[2]]}))
    (rank,) = summary_of(path).ranks
    assert rank.full_trace.overlap is None
    (problem,) = rank.problems
    assert "no communication" in problem


def test_one_rank_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE))
    with pytest.raises(SpecError, match="rank 0"):
        summarise([path, path])


@examples(500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_files_never_break_it(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, dropped, doubled: an answer whose parts sum, or a sentence."""
    text = bytearray(json.dumps(TRACE, indent=data.draw(st.sampled_from([None, 1]))).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 12))
        text[at : at + length] = data.draw(
            st.one_of(st.binary(max_size=8), st.sampled_from([b"}", b"{", b"]", b'"', b"-", b"NaN",
                      b"1e999", b"null", b'"x"', b"99999999999999999999", bytes(text[:40])]))
        )  # fmt: skip
        if not text:
            break
    content = bytes(text)
    if data.draw(st.booleans()):
        content = gzip.compress(content)
        cut = data.draw(st.integers(0, 20))
        content = content[: len(content) - cut]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    try:
        summary_of(path)
    except SpecError as error:
        assert all(problem.strip() for problem in error.problems)
