"""The section [eval]: what it reads, which sequences each rank evaluates, and what refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, read_run, run_from_dict, write_run
from shardwise.stacks.write.exports import STACKS, export_run

pytest.importorskip("torch")

from shardwise.engine.head_with_loss import IGNORED
from shardwise.spec.evaluation import EvalSettings
from shardwise.trainer.admit import check_can_train
from shardwise.trainer.data.batches import Layout
from shardwise.trainer.data.held_out import HeldOut

SEQ_LEN = 8


def run_with(**sections: Any) -> RunSpec:
    return run_from_dict({"model": "llama-3.2-1b", "cluster": "1x2xCPU", **sections})


def test_keys_that_are_not_given_are_those_of_the_training_data(tmp_path: Path) -> None:
    data = {"path": "train.jsonl", "text_key": "body", "packing": False}
    run = run_with(data=data, eval={"data": "held-out.jsonl", "every": 100})
    assert run.eval is not None
    assert run.eval.data.path == ("held-out.jsonl",)
    assert (run.eval.data.text_key, run.eval.data.packing) == ("body", False)
    own = run_with(data=data, eval={"data": {"path": ["a", "b"], "text_key": "text"}})
    assert own.eval is not None
    assert (own.eval.data.path, own.eval.data.text_key) == (("a", "b"), "text")
    (tmp_path / "run.toml").write_text(write_run(run))
    assert write_run(read_run(tmp_path / "run.toml")).count("held-out.jsonl") == 1


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"path": "a.txt"}, "eval": {"every": 10}}, "eval.data: is missing"),
        ({"eval": {"data": 5}}, "eval.data: must be a table"),
        ({"eval": {"evry": 5}}, "eval.evry"),
        ({"eval": {"tokens": 0}}, "eval.tokens"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        run_with(**sections)


def test_a_run_is_refused_before_its_processes_start(tmp_path: Path) -> None:
    missing = run_with(eval={"data": str(tmp_path / "nowhere.txt")})
    with pytest.raises(SpecError, match=r"eval\.data\.path: .*nowhere.txt does not exist"):
        check_can_train(missing, 2, 2)
    unsaved = run_with(train={"checkpoint": False}, eval={"keep_best": True})
    with pytest.raises(SpecError, match=r"eval\.keep_best"):
        check_can_train(unsaved, 2, 2)


def sequences(settings: EvalSettings, world: int, micro_batch: int) -> dict[int, list[Any]]:
    """The rows with targets that count of each rank, in as many rounds on every rank."""
    found, rounds = {}, set()
    for rank in range(world):
        layout = Layout(rank, world, micro_batch, 4, SEQ_LEN, first_step=3, first_sequence=7)
        held_out = HeldOut(settings, layout, 256, seed=5)
        batches = list(held_out.micro_batches())
        assert all(batch.inputs.shape == (micro_batch, SEQ_LEN) for batch in batches)
        rounds.add(len(batches))
        rows = [row for batch in batches for row in zip(batch.inputs, batch.targets, strict=True)]
        found[rank] = [
            (tuple(inputs.tolist()), tuple(targets.tolist()))
            for inputs, targets in rows if (targets != IGNORED).any()
        ]  # fmt: skip
    assert len(rounds) == 1
    return found


@pytest.mark.parametrize(("tokens", "count"), [(None, 13), (40, 5), (33, 5), (10_000, 13)])
def test_any_number_of_ranks_evaluates_each_sequence_once(
    tmp_path: Path, tokens: int | None, count: int
) -> None:
    """100 bytes: twelve sequences and one of three targets, at random if not all."""
    text = bytes(range(20, 120))
    (tmp_path / "held-out.txt").write_bytes(text)
    data = {"path": str(tmp_path / "held-out.txt"), "cache": str(tmp_path / "cache")}
    settings = EvalSettings.read({"data": data, "tokens": tokens})
    expected = sorted(row for rows in sequences(settings, 1, 1).values() for row in rows)
    assert len(expected) == count
    for world, micro_batch in ((2, 1), (3, 2), (4, 4), (16, 1)):
        found = sequences(settings, world, micro_batch)
        assert sorted(row for rows in found.values() for row in rows) == expected
    targets = [token for _, row in expected for token in row if token != IGNORED]
    if count == 13:
        assert sorted(targets) == list(text[1:])
    # Each target is the byte after its input.
    for inputs, row in expected:
        pairs = zip(inputs, row, strict=True)
        assert all(target in (before + 1, IGNORED) for before, target in pairs)


@pytest.mark.parametrize("stack", STACKS)
def test_an_export_says_that_nothing_is_evaluated(stack: str) -> None:
    run = describe_run(model="llama-3.2-1b", cluster="1x8xH100-SXM", strategy="zero3:8").resolved()
    evaluated = run._replace(eval=EvalSettings(every=100))
    before, after = (export_run(one, stack) for one in (run, evaluated))
    more = [one for one in after.differences if one not in before.differences]
    runs_shardwise = stack in ("slurm", "kubernetes")
    assert [list(one.fields) for one in more] == ([] if runs_shardwise else [["eval"]])
    assert runs_shardwise or after.text == before.text
