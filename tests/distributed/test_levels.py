"""More ranks than one group holds: saves, loads and agreements over three levels of groups."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest

from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
from shardwise.pytorch.device import ONE_GROUP
from tests.distributed.levels_run import ROUNDS, hear, load, lose_a_rank, save, start_first

# Less than the half hour that ranks wait for each other where nobody tells them.
PATIENCE_S = 300


@pytest.mark.parametrize(
    ("ranks", "one_group"),
    [(8, 1), pytest.param(ONE_GROUP + 1, ONE_GROUP, marks=pytest.mark.nightly)],
)
def test_a_save_of_many_ranks_loads_on_many_and_on_few(
    tmp_path: Path, workers: Workers, ranks: int, one_group: int
) -> None:
    """Eight ranks in groups of 2; or 33 in groups of 4, which are in groups of 4, then one of 3."""
    place = str(tmp_path / "checkpoints")
    for step, background in ((1, False), (2, True)):
        case = {"place": place, "step": step, "background": background, "one_group": one_group}
        assert workers.run(save, ranks, [case]) == [[""] * ranks]
    for folder in find_checkpoints(place).folders:
        assert verify_checkpoint(folder).findings == []
    load_case = {"place": place, "one_group": one_group}
    assert workers.run(load, ranks, [{**load_case, "marked": True}]) == [[True] * ranks]
    assert workers.run(load, 3, [{**load_case, "marked": False}]) == [[True] * 3]


def test_a_failure_of_one_rank_is_told_by_all(tmp_path: Path, workers: Workers) -> None:
    case = {"place": str(tmp_path), "step": 1, "background": False, "one_group": 1, "fails": 6}
    [said] = workers.run(save, 8, [case])
    assert len(set(said)) == 1
    assert "rank 6: plain is not a tensor" in said[0]
    assert not list(tmp_path.glob("step-*/manifest.json"))


def test_a_rank_goes_on_while_others_have_not_started(tmp_path: Path, workers: Workers) -> None:
    """Otherwise it would wait for the last one, which waits for it."""
    assert workers.run(start_first, 8, [{"folder": str(tmp_path)}]) == [[8 * (ROUNDS - 1)] * 8]


def test_a_value_of_one_rank_reaches_all(workers: Workers) -> None:
    """Longer ones than a sentence, and than what a group gathers; no text ends a value early."""
    values = [None, "", "a\0b é", {"steps": [*range(20_000)]}]
    [heard] = workers.run(hear, 8, [{"one_group": 1, "speaker": 5, "values": values}])
    assert heard == [values] * 8


@pytest.mark.parametrize("victim", first_in_gate(1, [4, 7, 0]))
def test_a_rank_that_dies_ends_all(tmp_path: Path, victim: int) -> None:
    """Of eight ranks in groups of two: a rank of the lowest level, of the second, of the top."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.distributed.levels_run"])
    ranks = [
        context.Process(target=lose_a_rank, args=(rank, 8, victim, str(tmp_path)))
        for rank in range(8)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(8)]
    for rank in set(range(8)) - {victim}:
        assert (tmp_path / f"rank-{rank}").read_text() == "lost a peer"
