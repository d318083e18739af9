"""Functions on real ranks: what they yield, and how they fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from shardwise.spec.catalogue import find_device
from shardwise.trials.accept.bench import Bench
from shardwise.trials.accept.checks import Check, CompletedCheck, run_checks
from shardwise.trials.accept.line import CheckFailedError, Line, judge
from shardwise.trials.accept.machine import Machine
from shardwise.trials.accept.ranks import on_ranks
from tests.command import PATIENCE_S, environment

MACHINE = Machine(2, "CPU", "gloo", 2**33, True, find_device("CPU"))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Told:
    """Progress that is kept."""

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.lines: list[Line] = []

    def check(self, name: str) -> None:
        self.checks.append(name)

    def line(self, line: Line) -> None:
        self.lines.append(line)


def check_of(function: str) -> Check:
    """A check with a line for every value that rank 0 yields."""

    def check(bench: Bench) -> Iterator[Line]:
        for value in bench.on_ranks(f"tests.accept.broken:{function}", {"values": 2}):
            yield judge(f"value {value}", "", "", True)

    return check


def descendants() -> list[psutil.Process]:
    """Of this process, without those that tests of this worker share."""
    known = ("forkserver", "resource_tracker")
    alive = [p for p in psutil.Process().children(recursive=True) if p.is_running()]
    return [p for p in alive if not any(word in " ".join(p.cmdline()) for word in known)]


def test_checks_that_break_are_failed_lines_and_the_others_go_on(tmp_path: Path) -> None:
    before = len(descendants())
    bench = Bench(MACHINE, tmp_path, lambda what: None)
    done: list[CompletedCheck] = []
    told = Told()
    checks = {name: check_of(name) for name in ("raises", "dies", "counts")}
    run_checks(list(checks), bench, PATIENCE_S, done, told, checks)
    found = {one.name: [line.verdict for line in one.lines] for one in done}
    assert found == {"raises": ["ok", "failed"], "dies": ["ok", "failed"], "counts": ["ok", "ok"]}
    reasons = {one.name: one.lines[-1].reason for one in done}
    assert "broken on purpose" in reasons["raises"]
    assert "rank 1 was killed by signal 9" in reasons["dies"]
    assert told.checks == list(checks)
    assert [line for one in done for line in one.lines] == told.lines
    assert len(descendants()) == before


def test_a_function_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    """The deadline counts from the first value: a busy machine takes long to start ranks."""
    seen = []
    values = on_ranks("tests.accept.broken:hangs", {}, 2, tmp_path / "it", float("inf"))
    seen.append(next(values))
    ranks = [p for p in psutil.process_iter() if p.name().startswith("rank ")]
    mine = [p for p in ranks if p.environ().get("SHARDWISE_ACCEPT_TASK", "").startswith(
        str(tmp_path))]  # fmt: skip
    assert len(mine) == 2
    values.close()  # type: ignore[attr-defined]
    _, alive = psutil.wait_procs(mine, timeout=PATIENCE_S)
    assert seen == [1]
    assert not alive
    with pytest.raises(CheckFailedError, match="deadline"):
        list(on_ranks("tests.accept.broken:hangs", {}, 2, tmp_path / "2", time.monotonic() + 1))
