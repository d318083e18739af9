"""What the scale page says: laws of growth, counts and bytes; seconds only within wide bounds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.__main__ import parts
from benchmarks.scale.checkpoints import STATES, chunks, cuts, piece_count, shapes
from benchmarks.scale.cost import Measured, exponent

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
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_group_holds_a_socket_for_every_other_rank_and_one_to_listen(
    found: Found, ranks: int
) -> None:
    assert one(found, "trainer", what="agree", count=ranks)["group_sockets"] == ranks - 1 + 1


@pytest.mark.timing
@pytest.mark.parametrize("ranks", [2, 16])
def test_pieces_of_an_index(found: Found, ranks: int) -> None:
    # Every row count of a 70B can be divided by 16: parameters and two moments in as many pieces,
    # a count of steps for each parameter, and two tensors of each rank.
    expected = 723 * 3 * ranks + 723 + 2 * ranks
    saved, loaded = (one(found, "checkpoints", what=w, ranks=ranks) for w in ("save", "load"))
    assert saved["pieces"] == loaded["pieces"] == piece_count(ranks, ranks) == expected


@pytest.mark.timing
def test_the_index_is_linear_in_pieces(found: Found) -> None:
    few, many = (one(found, "checkpoints", what="save", ranks=ranks) for ranks in (2, 16))
    each = (many["index_bytes"] - few["index_bytes"]) / (many["pieces"] - few["pieces"])
    assert 30 < each < 80
    assert exponent([few["pieces"], many["pieces"]], [few["save_s"], many["save_s"]]) < 2.2


def test_pieces_follow_how_torch_cuts() -> None:
    torch = pytest.importorskip("torch")
    for rows in (1, 3, 8, 1024, 8192):
        for shard in (1, 2, 5, 7, 16, 1000):
            filled = len(torch.chunk(torch.empty(rows), shard))
            # Ranks beyond those have nothing, all at the same place: the end.
            assert chunks(rows, shard) == filled + (filled < shard)


@pytest.mark.parametrize(("ranks", "shard"), [(3, 3), (8, 4), (12, 3)])
def test_what_ranks_write_is_every_piece_once(ranks: int, shard: int) -> None:
    written = [(c.tensor, c.offsets) for rank in range(ranks) for c in cuts(rank, ranks, shard)]
    assert len(written) == len(set(written)) == piece_count(ranks, shard)


def test_replicas_add_nothing_but_what_is_their_own() -> None:
    assert len(shapes()) == 723
    assert len(STATES) == 2
    assert piece_count(4096, 8) - piece_count(8, 8) == 2 * (4096 - 8)
    # Rows end it: 100,000 ranks are not cut 6 times finer than 16,384.
    assert piece_count(100_000, 100_000) < 1.5 * piece_count(16_384, 16_384)


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
