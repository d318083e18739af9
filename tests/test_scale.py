"""What the scale page says: laws of growth, counts and bytes; seconds only within wide bounds."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.__main__ import parts
from benchmarks.scale.checkpoints import shapes
from benchmarks.scale.cost import Measured, exponent
from benchmarks.scale.trainer import ring_hops, tree_hops
from shardwise.checkpoint.format.checksum import BLOCK

ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, list[Measured]]


@pytest.fixture(scope="module")
def found() -> Found:
    pytest.importorskip("torch")
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--quick", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return {name: [Measured(**one) for one in each] for name, each in told.items()}


def one(found: Found, part: str, **case: Any) -> Measured:
    (measured,) = (m for m in found[part] if case.items() <= m.case.items())
    return measured


@pytest.mark.timing
def test_a_plan_hardly_grows_with_devices(found: Found) -> None:
    small = one(found, "plan", command="plan", devices=64)
    large = one(found, "plan", command="plan", devices=100_000)
    assert large["answer_s"] < 5 * small["answer_s"]
    # 1,562 times the devices; what is searched grows with halvings.
    assert large["priced"] <= 3 * small["priced"]


@pytest.mark.timing
@pytest.mark.parametrize(("layers", "accumulate"), [(16, 1), (32, 1), (64, 1), (32, 4), (32, 8)])
def test_spans_of_a_step(found: Found, layers: int, accumulate: int) -> None:
    # A block gathers, copies out and computes forward, again backward, copies in and reduces: 8.
    # The root gathers and copies out once, computes twice, copies in and reduces: 6. One update.
    measured = one(found, "timeline", layers=layers, accumulate=accumulate)
    assert measured["spans"] == accumulate * (8 * layers + 6) + 1


@pytest.mark.timing
def test_what_a_rank_adds_to_a_step(found: Found) -> None:
    rank = one(found, "trainer", what="rank")
    assert rank["agreed_bytes"] == 5 * 8
    # Six numbers, four times and a name.
    assert rank["beat_bytes"] == 6 * 8 + 4 * 8 + 32
    assert rank["beats_s"] < 5e-3
    assert rank["line_s"] < 5e-3


@pytest.mark.timing
def test_three_levels_hold_fewer_hops_and_sockets() -> None:
    pytest.importorskip("torch")
    from shardwise.engine.rank_tree import level_width

    # Groups of 47, and of 46 at the top: three gathers of 2, three broadcasts of 5.
    assert level_width(100_000) == 47
    assert tree_hops(100_000) == 3 * 2 + 3 * 5
    assert ring_hops(100_000) == 2 * 99_999
    for ranks in (33, 64, 1000, 1001, 99_999):
        width = level_width(ranks)
        assert (width - 1) ** 3 < ranks <= width**3


@pytest.mark.timing
def test_an_agreement_is_hidden_by_a_step(found: Found) -> None:
    for measured in found["trainer"]:
        if measured.case["what"] == "agree":
            assert measured["exposed_s"] < 0.1


@pytest.mark.timing
@pytest.mark.parametrize("ranks", [16, 100_000])
def test_the_index_of_a_rank(found: Found, ranks: int) -> None:
    rank = one(found, "checkpoints", ranks=ranks)
    known = shapes("llama-3-70b").values()
    assert len(known) == 723
    # Parameters and two moments, and two tensors of its own; rank 0 has the counts of steps.
    assert rank["pieces"] == 723 * 3 + 2
    assert rank["pieces_read"] == 723 * 4 + 2
    assert rank["table_bytes"] == 24 * ranks + 4 * -(-ranks // 1024)
    blocks = sum(
        3 * -(-(4 * -(-shape[0] // ranks) * math.prod(shape[1:])) // BLOCK) for shape in known
    )
    own = [["rank.1.random.cpu", "uint8", [5056]], ["rank.1.window", "float64", [5]]]
    text = len(json.dumps(own, separators=(",", ":")))
    assert rank["index_bytes"] == 4 + 4 + text + 4 * (blocks + 2)


@pytest.mark.timing
def test_a_rank_of_100000_reads_and_plans_what_one_of_16_does(found: Found) -> None:
    few, many = (one(found, "checkpoints", ranks=ranks) for ranks in (16, 100_000))
    # Only the sizes of axes have more digits.
    assert many["layout_bytes"] - few["layout_bytes"] == len("100000") - len("16")
    # Of the table, a group of 1,024 ranks.
    assert many["read_bytes"] <= 800_000
    assert many["load_s"] < 2 * few["load_s"] + 0.1
    assert many["plan_s"] < 2 * few["plan_s"] + 0.1


@pytest.mark.timing
@pytest.mark.parametrize(("ranks", "calls"), [(64, 500), (512, 500), (64, 5000)])
def test_ranks_joined(found: Found, ranks: int, calls: int) -> None:
    joined = one(found, "joining", ranks=ranks, calls=calls)
    # Half of the calls are of all ranks, half of the eight of each node.
    world, nodes = calls // 2, calls // 2 * (ranks // 8)
    assert joined["collectives"] == world + nodes
    # Rank 3 is 5 of 50 µs late in its own node and in the world.
    assert (joined["late"], joined["late_others"]) == (calls, 0)
    assert joined["transfer_ns"] == 50_000 * (world + nodes) - 5_000 * (world + calls // 2)


@pytest.mark.timing
def test_joining_is_linear(found: Found) -> None:
    few, many = (one(found, "joining", ranks=ranks, calls=500) for ranks in (64, 512))
    assert exponent([64, 512], [few["join_s"], many["join_s"]]) < 1.7


@pytest.mark.timing
def test_reading_is_linear(found: Found) -> None:
    few, many = (one(found, "traces", what="events", count=count) for count in (3, 30))
    assert many["events"] == 10 * few["events"]
    assert exponent([few["events"], many["events"]], [few["read_s"], many["read_s"]]) < 1.5
    ranks = [m for m in found["traces"] if m.case["what"] == "ranks"]
    if not all(m.runs for m in ranks):
        pytest.skip(ranks[0].why)
    assert [m["calls"] for m in ranks] == [84 * m.case["count"] for m in ranks]
    assert [m["collectives"] for m in ranks] == [84, 84]


@pytest.mark.timing
def test_every_part_has_a_table_and_its_place_on_the_page(found: Found) -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    assert re.findall(r"<!-- measured: (\w+) -->", page) == list(parts())
    for name, part in parts().items():
        measured = [m for m in found[name] if m.runs]
        if measured:
            assert part.table(measured).startswith("| ")
