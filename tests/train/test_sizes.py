"""Numbers of hosts on which an elastic run trains: ranges, global batches, memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch.environment import HostRange, host_range
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, read_run
from shardwise.trainer.sizes import sizes_of

RUN = """
cluster = "4x8xH100-SXM@400Gbps"
model = "{model}"
job = {{ seq_len = 4096{batch} }}
strategy = {{ kind = "zero3", micro_batch = 1, recompute = "full" }}
"""


def run_of(folder: Path, model: str = "llama-3-8b", batch: str = "") -> RunSpec:
    file = folder / "run.toml"
    file.write_text(RUN.format(model=model, batch=batch))
    return read_run(file)


@pytest.mark.parametrize(
    ("text", "hosts"), [("4", (4, 4)), ("1:4", (1, 4)), ("3:3", (3, 3)), ("1", (1, 1))]
)
def test_a_range_of_hosts(
    text: str, hosts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", text)
    assert host_range() == HostRange(*hosts)


@pytest.mark.parametrize("text", ["", "two", "4:1", "0", "1:", ":4", "-1", "1:2:3"])
def test_what_is_no_range_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", text)
    with pytest.raises(SpecError, match="PET_NNODES"):
        host_range()


def test_fewer_hosts_accumulate_more(tmp_path: Path) -> None:
    """32 devices x 3 micro-batches of 4,096 tokens; 24 devices take 4 and 16 take 6."""
    run = run_of(tmp_path, batch=f", global_batch = {96 * 4096}")
    sizes = sizes_of(run, 8, HostRange(1, 4))
    assert {size.hosts: size.accumulate for size in sizes} == {4: 3, 3: 4, 2: 6, 1: 12}
    assert all(size.predicted is not None for size in sizes)


def test_a_size_that_does_not_divide_the_batch_is_not_used(tmp_path: Path) -> None:
    run = run_of(tmp_path, batch=f", global_batch = {64 * 4096}")
    sizes = {size.hosts: size for size in sizes_of(run, 8, HostRange(1, 4))}
    assert [hosts for hosts, size in sizes.items() if not size.problem] == [4, 2, 1]
    assert "job.global_batch" in sizes[3].problem


def test_a_size_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    """States of 70B parameters are 1,129 GB: two hosts have 16 x 80 GB, one has half of that."""
    run = run_of(tmp_path, "llama-3-70b", f", global_batch = {32 * 4096}")
    sizes = {size.hosts: size for size in sizes_of(run, 8, HostRange(1, 4))}
    assert not sizes[4].problem
    assert "does not fit" in sizes[1].problem


def test_a_batch_that_would_vary_with_the_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"job\.global_batch.*131,072 on 4 hosts"):
        sizes_of(run_of(tmp_path), 8, HostRange(1, 4))
    assert len(sizes_of(run_of(tmp_path), 8, HostRange(4, 4))) == 1


def test_a_run_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "llama-3-70b", f", global_batch = {32 * 4096}")
    with pytest.raises(SpecError, match="does not fit"):
        sizes_of(run, 8, HostRange(1, 1))
