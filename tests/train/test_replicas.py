"""What replica groups say to each other and to people."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.replicas.changes import change_sentence
from shardwise.trainer.replicas.loop import given_share
from shardwise.trainer.replicas.roll_call import Entry, RollCall


def batch(number: int) -> MicroBatch:
    return MicroBatch(torch.tensor([number]), torch.tensor([number]))


def numbers(batches: list[MicroBatch]) -> list[int]:
    return [int(one.inputs) for one in batches]


# Three groups of two micro-batches: 0 and 3 are of the first group.
SHARES = [[batch(group + 3 * number) for number in range(2)] for group in range(3)]


def test_with_all_groups_present_each_trains_its_own_batches() -> None:
    assert [numbers(given_share(SHARES, place, 3)) for place in range(3)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


@pytest.mark.parametrize("present", [1, 2, 3])
def test_given_batches_are_all_trained_once(present: int) -> None:
    trained = [numbers(given_share(SHARES, place, present)) for place in range(present)]
    assert sorted(number for of_group in trained for number in of_group) == list(range(6))
    assert max(map(len, trained)) - min(map(len, trained)) <= 1


def entry(
    tokens: int = 8, stops: int = 0, tries: int = 0, digest: int = 7, present: int = 1
) -> Entry:
    return Entry(present=present, digest=digest, tokens=tokens, stops=stops, tries=tries)


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ({0: entry(), 1: entry()}, []),
        # The group that trains already stays, whatever its number.
        ({0: entry(digest=8, tries=1), 1: entry(), 2: entry()}, [0]),
        ({0: entry(tries=1), 1: entry(digest=8, tries=1)}, [1]),
        ({0: entry(), 1: entry(present=2, digest=14)}, [1]),
    ],
)
def test_a_group_of_another_run_is_refused_and_the_others_train_on(
    entries: dict[int, Entry], refused: list[int]
) -> None:
    call = RollCall(entries)
    assert list(call.refused()) == refused
    assert call.is_left_by_some == bool(refused)


def test_a_roll_call_sums_the_tokens_of_those_present() -> None:
    assert RollCall({0: entry(8), 2: entry(5)}).tokens == 13


def test_only_if_all_stop_does_the_run_stop() -> None:
    assert not RollCall({0: entry(stops=1), 1: entry()}).all_stop
    assert RollCall({0: entry(stops=1), 1: entry(stops=1)}).all_stop


def test_one_group_that_saves_or_has_saved_is_enough() -> None:
    nobody = RollCall({1: entry(), 2: entry()})
    assert (nobody.first, nobody.has_saver, nobody.is_saved) == (1, False, False)
    assert RollCall({1: entry(), 2: entry()._replace(saves=1)}).has_saver
    assert RollCall({1: entry(), 2: entry()._replace(saved=1)}).is_saved


def test_groups_that_train_already_do_not_wait_for_others() -> None:
    assert RollCall({0: entry(tries=3), 1: entry(tries=1)}).tries == 3
    assert RollCall({0: entry(tries=3), 1: entry()}).tries == 0


@pytest.mark.parametrize(
    ("present", "absent", "batches", "says"),
    [
        ((0, 2), (1,), "dropped", "group 1 is absent from step 31 on; 0 and 2 train"),
        ((0, 2), (1,), "dropped", "the absent batches are dropped"),
        ((1,), (0, 2), "given", "groups 0 and 2 are absent from step 31 on; 1 trains"),
        ((1,), (0, 2), "given", "given to the others"),
        ((0, 1, 2), (), "dropped", "All 3 replica groups train from step 31 on"),
    ],
)
def test_a_change_is_told_in_a_sentence(
    present: tuple[int, ...], absent: tuple[int, ...], batches: str, says: str
) -> None:
    assert says in change_sentence(31, present, absent, batches)
