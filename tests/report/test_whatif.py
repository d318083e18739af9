"""Screens of what-ifs, drawn from figures given here, so that no predictor can change them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.difference import Difference
from shardwise.planning.money import DAY, Budget
from shardwise.planning.problem import Problem
from shardwise.planning.rows import Candidate
from shardwise.planning.threshold import Target, Threshold
from shardwise.planning.vary import with_quantity
from shardwise.planning.whatif import Point
from shardwise.report.money import deadline_words
from shardwise.report.whatif import (
    difference_words,
    print_heading,
    print_study,
    print_threshold,
)
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.strategy import Strategy
from shardwise.spec.wording import KeyedProblem
from shardwise.step.profile import Bottleneck
from tests.screens import assert_screen

Printed = Callable[[], str]
SHARES = st.floats(0, 1)


def asked(cluster: str = "8x8xH100-SXM@400Gbps") -> Problem:
    job = Job(seq_len=4096)
    return Problem(find_model("llama-3-8b"), find_cluster(cluster), job, Strategy(kind="zero3"))


def at(
    problem: Problem,
    name: str,
    text: str,
    *,
    micro_batch: int = 2,
    recompute: str | float = "none",
    kind: str = "zero3",
    per_device: float = 7000.0,
    exposed: float = 0.03,
    gib: float = 60.0,
    mfu: float = 0.37,
    binding: Bottleneck = "memory",
) -> Point:
    """A point whose best configuration reaches so many tokens/s per device."""
    changed, value = with_quantity(problem, name, text) if name else (problem, text)
    cluster = changed.cluster
    strategy = Strategy.read({"kind": kind, "micro_batch": micro_batch, "recompute": recompute})
    strategy = strategy.resolve(cluster.devices, cluster.devices_per_node)
    speed = per_device * cluster.devices
    step = changed.job.tokens_per_step(strategy) / speed
    size = gib * 2**30
    figures = (size - 2**31, size, speed, step, step * (1 - exposed), 0.0, step * exposed, 0.0)
    return Point(value, changed, Candidate(strategy, *figures), mfu, binding)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    monkeypatch.setenv("COLUMNS", "80")

    def read() -> str:
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        return text

    return read


def test_networks(printed: Printed) -> None:
    problem = asked()
    points = [
        at(problem, "network", "50", micro_batch=8, recompute="full", per_device=6000.0, mfu=0.312,
           exposed=0.0341, binding="bandwidth"),
        at(problem, "network", "100", micro_batch=4, recompute="selective", per_device=6500.0,
           mfu=0.338, exposed=0.034, binding="bandwidth"),
        at(problem, "network", "400", per_device=7250.0, mfu=0.377, exposed=0.011),
        at(problem, "network", "800", per_device=7251.0, mfu=0.37704, exposed=0.0109),
    ]  # fmt: skip
    print_heading(problem, fixed=False)
    print_study("network", points, Budget(tokens=1e11, price=2.5, deadline_s=2.8 * DAY))
    assert_screen("whatif-network", printed())


def test_devices_by_name_have_prices_and_warnings_of_their_own(printed: Printed) -> None:
    problem = asked()
    points = [
        at(problem, "device", "A100-80GB", kind="zero2", per_device=3300.0, mfu=0.541),
        at(problem, "device", "H100-SXM", per_device=7250.0, mfu=0.377),
        at(problem, "device", "H200-SXM", per_device=7400.0, mfu=0.385, gib=100.0),
        at(problem, "device", "MI300X", per_device=10_600.0, mfu=0.418, gib=140.0),
    ]
    prices = {"A100-80GB": 1.6, "H100-SXM": 2.5, "H200-SXM": 3.5, "MI300X": 2.0}
    print_study("device", points, Budget(tokens=1e11, price=prices))
    assert_screen("whatif-device", printed())


def test_numbers_of_devices(printed: Printed) -> None:
    problem = asked()
    refused = KeyedProblem("devices", "12 do not fill nodes of 8")
    points = [
        Point("2", with_quantity(problem, "devices", "2")[0], None, None, "memory"),
        at(problem, "devices", "8", kind="zero2", micro_batch=1, per_device=7100.0, mfu=0.369),
        Point("12", problem, None, None, "memory", refused),
        at(problem, "devices", "512", per_device=6900.0, mfu=0.359, exposed=0.05),
    ]
    print_study("devices", points, Budget(price=2.5))
    assert_screen("whatif-devices", printed())


def test_where_nothing_fits(printed: Printed) -> None:
    problem = asked()
    changed, value = with_quantity(problem, "devices", "2")
    print_study("devices", [Point(value, changed, None, None, "memory")], Budget())
    assert_screen("whatif-nothing", printed())


def test_thresholds(printed: Printed) -> None:
    problem, node = asked(), asked("8xH100-SXM")
    half = Target("mfu", 0.36)
    enough = at(problem, "network", "120", mfu=0.361)
    here = at(node, "", str(node.cluster), mfu=0.367)
    budget = Budget(tokens=1e11, price=2.5)
    small = [at(node, "devices", text, mfu=0.3) for text in ("4", "8")]
    for found, where in (
        (Threshold("network", half, enough, [enough]), problem),
        (Threshold("network", half, None, [here], "no network"), node),
        (Threshold("network", half._replace(value=0.5), None, [here], "no network"), node),
        (Threshold("devices", Target("step", 0.1), None, small, "network needed"), node),
        (
            Threshold("memory", Target("exposed", 0.001), None, [at(problem, "memory", "2048")]),
            problem,
        ),
    ):
        print_threshold(found, where, budget)
    assert_screen("whatif-least", printed())


def test_missed_deadlines() -> None:
    problem, node = asked(), asked("8xH100-SXM")
    target = Target("days", DAY, 1e11)
    answer = at(problem, "devices", "168")
    found = [
        (Threshold("devices", target, answer, [answer]), problem),
        (Threshold("devices", target, None, [], "network needed"), node),
        (Threshold("devices", target, None, [answer]), problem),
    ]
    budget = Budget(tokens=target.tokens, deadline_s=DAY)
    told = [deadline_words(*one, budget) for one in found]
    assert "upper end of the 90% interval" in told[0]
    assert_screen("whatif-deadline", "\n".join(told))


@given(
    speed=st.floats(0.01, 100),
    mfu=st.floats(-0.5, 0.5),
    exposed=st.none() | st.tuples(SHARES, SHARES),
    peak=st.none() | st.floats(0.01, 50),
)
def test_no_change_is_never_worded_as_one(
    speed: float, mfu: float, exposed: tuple[float, float] | None, peak: float | None
) -> None:
    strategy = Strategy(kind="zero3").resolve(8, 8)
    change = Difference(speed, mfu, (strategy, strategy), exposed=exposed, peak=peak)
    words = difference_words(change)
    for before, after in re.findall(r"(\S+) → (\S+)", words):
        assert before != after
    assert not re.search(r"[+-]0(\.0+)?(%|\b)(?!\.)", words)
    assert " 1.0x" not in words
    (points,) = re.findall(r"MFU (\S+) points", words) or ["0"]
    assert abs(float(points) - 100 * mfu) <= 0.051
    assert ("same MFU" in words) == (points == "0")
    assert words.endswith(".")
