"""Replica groups of several hosts, which are network namespaces: real processes, real torchft."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft", reason="needs torchft: pip install shardwise[torchft]")
from benchmarks.lab.network import Host, available, hosts
from benchmarks.replicas.groups import Groups, replica_groups, wait_until
from tests.distributed.test_replicas import assert_same_bits, last_step, reaches

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root"),
]
Lab = list[Host]
SECRET = secrets.token_hex(32)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts of group 0, and one of group 1."""
    if (reason := available()) is not None:
        pytest.skip(reason)
    with hosts(3, None, "rep") as made:
        yield made


def said(groups: Groups) -> str:
    """What both hosts of group 0 said; either has its rank 0."""
    return groups.said(0) + groups.said(0, 1)


def listening(host: Host) -> set[str]:
    """The addresses on which processes of a host listen."""
    words = host.command("ss", "-H", "-tln")
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}


def start_part(groups: Groups, lab: Lab, part: int) -> None:
    """Start one of the two hosts of group 0."""
    variables = {
        "PET_NNODES": "2",
        "PET_RDZV_ENDPOINT": f"{lab[0].address}:29400",
        "PET_RDZV_ID": "it-0",
        "SHARDWISE_RDZV_SECRET": SECRET,
    }
    groups.start(0, part, lab[part], processes=1, variables=variables)


def test_a_group_of_two_hosts_loses_one_and_returns(tmp_path: Path, lab: Lab) -> None:
    with replica_groups(tmp_path, groups=2, server=lab[2]) as groups:
        for part in range(2):
            start_part(groups, lab, part)
        groups.start(1, host=lab[2])
        assert reaches(groups, 25, group=0), said(groups)
        assert groups.present(1) == [0, 1]
        for host in lab:
            # The ranks of a group on one host meet on its loopback.
            assert listening(host) - {"127.0.0.1"} == {host.address}
        groups.kill(0, part=1)
        assert wait_until(lambda: groups.present(1) == [1]), groups.said(1)
        assert reaches(groups, last_step(groups) + 5, group=1)
        start_part(groups, lab, 1)
        assert wait_until(lambda: groups.present(1) == [0, 1]), said(groups)
        assert reaches(groups, last_step(groups) + 5, group=0)
        assert groups.stop() == [143, 143, 143]
        assert_same_bits(groups)


def test_if_one_rank_of_a_group_cannot_catch_up_the_group_starts_again(
    tmp_path: Path, lab: Lab
) -> None:
    """The second host of group 0 does not reach group 1 at first; its first host does."""
    second, other = lab[1].namespace, lab[2].address

    def route(action: str) -> None:
        words = ("ip", "-n", second, "route", action, "blackhole", f"{other}/32")
        subprocess.run(words, check=True, capture_output=True)

    with replica_groups(tmp_path, groups=2, server=lab[0], restart="last_call_s = 0.5") as groups:
        groups.start(1, host=lab[2])
        assert reaches(groups, 10, group=1), groups.said(1)
        route("add")
        for part in range(2):
            start_part(groups, lab, part)
        assert wait_until(lambda: "did not arrive on every rank" in said(groups)), said(groups)
        route("del")
        assert wait_until(lambda: groups.present(1) == [0, 1]), said(groups)
        assert reaches(groups, last_step(groups) + 5, group=0)
        assert groups.stop() == [143, 143, 143]
        assert_same_bits(groups)
        assert "Restarting" not in groups.said(1)
