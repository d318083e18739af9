"""A slice of the fault matrix, a smaller one in the gate; all is `python -m benchmarks.faults`."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults.cases import Case, Matrix, all_cases

pytest.importorskip("torch")

SLICE = (
    Case("SIGKILL", "during shard write"),
    Case("SIGTERM", "mid-step"),
    Case("SIGSTOP", "before save"),
    Case("segfault", "after commit"),
    Case("exception", "before commit"),
    Case("NaN gradient", "mid-step"),
    Case("EIO", "during load"),
    Case("EIO", "mid-step"),
    Case("ENOSPC", "during shard write"),
    Case("bit flip", "after commit"),
    Case("stale shard", "after commit"),
    Case("malicious metadata", "after commit"),
    Case("`../`", "after commit"),
)
# A rank that dies, one that hangs, and a file that is damaged.
GATE = (
    Case("SIGKILL", "during shard write"),
    Case("SIGSTOP", "before save"),
    Case("bit flip", "after commit"),
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    # Tests run beside each other: a rank that gets no time for seconds does not hang.
    return Matrix(tmp_path_factory.mktemp("faults"), patience=10)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in GATE else [pytest.mark.nightly], id=str(case))
        for case in SLICE
    ],
)
def test_a_fault_ends_as_promised(case: Case, matrix: Matrix) -> None:
    if case.fault == "ENOSPC" and os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    problems = matrix.run(case).problems
    assert not problems, "\n".join(problems)


def test_the_slice_is_of_the_matrix() -> None:
    assert set(SLICE) <= set(all_cases())
