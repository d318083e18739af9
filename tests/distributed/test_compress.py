"""Compressed gradients against arithmetic of the test's own, and runs resumed with them."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.strategy import Strategy
from shardwise.step.profile import CollectiveProfile, by_operation
from tests.distributed.runs import losses, write
from tests.distributed.test_optimizers import _checksums
from tests.distributed.test_states import CHECKPOINT, trained
from tests.distributed.workers import Workers
from tests.gate import in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from tests.distributed.compress_run import FIRST, SECOND, average, gradients_of
from tests.distributed.train_run import run_toml

STEPS, START, RANK = 6, 2, 3


def averaged(
    workers: Workers, processes: int, dtype: str = "fp32", again: tuple[int, ...] = (), **how: Any
) -> list[list[list[Any]]]:
    """The averaged gradients by rank, step and parameter, as tensors in fp64."""
    strategy = Strategy(kind="ddp", param_dtype=dtype, master_dtype=dtype, **how)
    case = {
        "strategy": strategy.resolve(processes, processes).model_dump(mode="json"),
        "steps": STEPS,
        "again": again,
    }
    [ranks] = workers.run(average, processes, [case])
    return [
        [[torch.tensor(one, dtype=torch.float64) for one in step] for step in steps]
        for steps in ranks
    ]


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_gradients_are_rounded_before_they_are_averaged(workers: Workers, compress: str) -> None:
    ranks = averaged(workers, 2, compress=compress)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[compress]
    for found in ranks:
        for step, parameters in enumerate(found):
            ours, theirs = (gradients_of(rank, step, torch.float32) for rank in range(2))
            for one, other, mean in zip(ours, theirs, parameters, strict=True):
                # Halves are exact; the sum is rounded once more.
                summed = (one.to(narrow).double() + other.to(narrow).double()) / 2
                assert torch.equal(mean, summed.to(narrow).double().flatten())


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_powersgd_is_the_projection_of_its_paper(workers: Workers, processes: int) -> None:
    """Each mean is projected on what it shares with the step before; what is left is added next.

    The projection does not depend on the factors by which it is computed.
    """
    ranks = averaged(
        workers, processes, "fp64",
        compress="powersgd", powersgd_rank=RANK, powersgd_start=START,
    )  # fmt: skip
    errors = [[torch.zeros(shape, dtype=torch.float64) for shape in (FIRST, SECOND)]
              for _ in range(processes)]  # fmt: skip
    before: list[Any] = [None, None]
    for step in range(STEPS):
        grads = [gradients_of(rank, step, torch.float64) for rank in range(processes)]
        means = [torch.stack(one).mean(0) for one in zip(*grads, strict=True)]
        expected = means
        if step >= START:
            for number in range(2):
                local = [grads[rank][number] + errors[rank][number] for rank in range(processes)]
                mean = torch.stack(local).mean(0)
                if before[number] is None:
                    # Only the start is random: the row space of its result is the second factor's.
                    before[number] = ranks[0][step][number].view(mean.shape)
                    low = before[number]
                    assert torch.linalg.matrix_rank(low, rtol=1e-10) == RANK
                    columns = torch.linalg.svd(low).U[:, :RANK]
                else:
                    columns = torch.linalg.svd(mean @ before[number].T).U[:, :RANK]
                low = columns @ (columns.T @ mean)
                before[number] = low
                for rank in range(processes):
                    errors[rank][number] = local[rank] - low
                expected = [low if at == number else one for at, one in enumerate(expected)]
        for found in ranks:
            for ours, theirs in zip(expected, found[step], strict=True):
                error = (theirs - ours.flatten()).norm() / ours.norm()
                assert error < 1e-12, (step, error)


@pytest.mark.parametrize(
    ("processes", "how"),
    [
        # Each tensor is a bucket of its own.
        (2, {"compress": "powersgd", "powersgd_start": START, "ddp_bucket_mib": 0.004}),
        # All are in one bucket. With 3 ranks, sums depend on where in it a gradient is.
        (3, {}),
    ],
    ids=["powersgd", "plain"],
)
def test_a_new_process_continues_to_the_bit(
    workers: Workers, processes: int, how: dict[str, Any]
) -> None:
    at_once = averaged(workers, processes, **how)
    resumed = averaged(workers, processes, again=(1, 3, 4), **how)
    for again, once in zip(resumed, at_once, strict=True):
        for ours, theirs in zip(chain(*again), chain(*once), strict=True):
            assert torch.equal(ours, theirs)


def _traffic(profile: dict[str, Any]) -> dict[tuple[str, int, str], tuple[int, int]]:
    return by_operation(CollectiveProfile(**one) for one in profile["traffic"])


POWERSGD = 'compress = "powersgd"\npowersgd_rank = 2\npowersgd_start = 2\nddp_bucket_mib = 0.05'
RUNS: list[tuple[int, str]] = [(2, POWERSGD), (2, 'compress = "bf16"'), (4, POWERSGD)]


@pytest.mark.parametrize(("processes", "strategy"), in_gate(RUNS[:1], RUNS))
def test_a_resumed_run_is_equal_to_the_bit(
    workers: Workers, tmp_path: Path, processes: int, strategy: str
) -> None:
    usual: dict[str, Any] = {"kind": "ddp", "processes": processes, "micro_batch": 8 // processes}
    fields = {**usual, "strategy": strategy}
    at_once = trained(workers, tmp_path / "once", 8, **fields)
    twice = trained(workers, tmp_path / "twice", 2, 4, 8, **fields)
    assert twice == at_once
    assert _checksums(tmp_path / "twice", 8) == _checksums(tmp_path / "once", 8)
    folder = tmp_path / "once" / "runs" / "it"
    predicted, measured = (
        json.loads((folder / f"{kind}.json").read_text()) for kind in ("prediction", "measurement")
    )
    # Of a step after PowerSGD has begun.
    assert _traffic(measured) == _traffic(predicted)
    plain = trained(workers, tmp_path / "plain", 8, **usual)
    assert plain != at_once, "compression changed nothing"


@pytest.mark.nightly
def test_a_run_continues_on_another_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"kind": "ddp", "strategy": POWERSGD, "micro_batch": 2}
    found = trained(workers, tmp_path / "run", 4, processes=2, **fields)
    (tmp_path / "run").rename(tmp_path / "kept")
    file = write(tmp_path / "kept", steps=8, log_every=1, train=CHECKPOINT, **fields)
    [ranks] = workers.run(run_toml, 4, [{"file": str(file)}])
    assert [(one["reason"], one["steps"]) for one in ranks] == [("done", 8)] * 4
    seen = losses(tmp_path / "kept")
    assert seen[:4] == found
    # Nothing begins anew but the error.
    assert seen[4] == pytest.approx(seen[3], rel=0.1)
