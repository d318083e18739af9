"""Which runs can be trained in replica groups, and what each group trains."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.spec.train import RestartSettings
from shardwise.trainer.replicas.group import (
    REPLICA,
    ReplicaGroup,
    hang_limits,
    is_managed,
    one_group,
    replica_group,
    settings_checksum,
)

RESTART = {"engine": "torchft", "lighthouse": "127.0.0.1:29510"}
HYBRID = {"kind": "zero3", "shard": 2, "replicate": 3}


def managed(**sections: Any) -> RunSpec:
    given: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "cluster": "3x2xCPU",
        "strategy": HYBRID,
        "train": {"restart": RESTART},
    }
    return run_from_dict({**given, **sections})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check runs as on a machine that has torchft."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found("json" if name == "torchft" else name)
    )


def test_it_is_off_by_default() -> None:
    run = managed(train={})
    assert not is_managed(run)
    assert replica_group(run, {}) is None
    assert one_group(run) is run


@pytest.mark.usefixtures("installed")
def test_a_launch_is_the_group_that_its_environment_names() -> None:
    assert replica_group(managed(), {REPLICA: "2"}) == ReplicaGroup(2, 3)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("number", ["", "3", "-1", "one"])
def test_any_other_number_is_refused(number: str) -> None:
    with pytest.raises(SpecError, match="SHARDWISE_REPLICA: .* 0 up to 2"):
        replica_group(managed(), {REPLICA: number})


def test_a_group_trains_one_copy_with_its_share_of_the_batch() -> None:
    run = one_group(managed(job={"seq_len": 16, "global_batch": 16 * 12}))
    assert (run.strategy.shard, run.strategy.replicate) == (2, 1)
    assert run.job.global_batch == 16 * 4


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(SpecError, match=r"job.global_batch: 160 tokens .* 3 replica groups"):
        one_group(managed(job={"seq_len": 16, "global_batch": 160}))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"strategy": "ddp"}, "needs hybrid sharding"),
        ({"strategy": "zero3"}, "manages the replicate axis, but the strategy has none"),
        ({"strategy": {**HYBRID, "tensor": 2}}, "not built for tensor parallelism"),
        ({"strategy": {**HYBRID, "context": 2}}, "not built for context parallelism"),
        ({"strategy": {**HYBRID, "offload": True}}, "not built for offloading"),
        ({"strategy": {**HYBRID, "grad_sync": "local", "accumulate": 2}}, "strategy.grad_sync"),
        ({"adapter": {"rank": 8}}, "not built for adapters"),
        ({"eval": {"every": 10}}, "not built for a held-out loss"),
        ({"job": {"seq_len": 16, "optimizer": "muon"}}, "not built for the optimizer muon"),
        ({"data": {"source": "tests.distributed.sources:count"}}, "which data.source cannot"),
        ({"train": {"restart": RESTART, "checkpoint": False}}, "needs checkpoints"),
        ({"train": {"restart": {**RESTART, "min_replicas": 4}}}, "min_replicas: 4 is more than"),
        (
            {"train": {"restart": {**RESTART, "absent_batches": "given"}}},
            'set strategy.grad_sync to "last"',
        ),
    ],
)
def test_what_it_is_not_built_for_is_refused_in_a_sentence(
    sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        replica_group(managed(**sections), {REPLICA: "0"})
    assert len(refused.value.problems) == 1
    assert says in refused.value.problems[0]


@pytest.mark.usefixtures("installed")
def test_a_varying_number_of_hosts_in_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "1:2")
    with pytest.raises(SpecError, match="fixed number of hosts"):
        replica_group(managed(), {REPLICA: "0"})


def test_without_torchft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"pip install shardwise\[torchft\]"):
        replica_group(managed(), {REPLICA: "0"})


@pytest.mark.parametrize(
    ("restart", "says"),
    [
        ({"engine": "torchft"}, "needs a lighthouse"),
        ({"engine": "torchft", "lighthouse": "10.0.0.9"}, "lighthouse"),
        ({"absent_batches": "given"}, 'absent_batches means nothing without engine = "torchft"'),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(restart: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        managed(train={"restart": restart})


def test_groups_may_differ_only_in_what_changes_no_update() -> None:
    digest = settings_checksum(managed())
    elsewhere = {"restart": {**RESTART, "attempts": 9}, "folder": "elsewhere", "log_every": 1}
    assert settings_checksum(managed(train=elsewhere)) == digest
    assert settings_checksum(managed(train={"restart": RESTART, "seed": 1})) != digest
    assert settings_checksum(managed(job={"seq_len": 32})) != digest


def test_a_rank_that_waits_for_another_group_does_not_count_as_hung() -> None:
    settings = managed(train={"restart": {**RESTART, "replica_timeout_s": 50}}).train
    assert settings is not None
    limits = hang_limits(settings.restart)
    assert limits.named_after_s == settings.restart.replica_timeout_s
    assert limits.killed_after_s > settings.restart.replica_timeout_s
    assert hang_limits(RestartSettings()) == RestartSettings()
