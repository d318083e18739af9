"""Tokens that a library sends to their experts: how many copies, and what else stays."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardwise.predict.api import estimate_run
from shardwise.spec.question import describe_run
from shardwise.spec.run import RunSpec
from shardwise.units.dispatch import copies_among, dispatch_of

MIXTURE = "qwen3-30b-a3b"


def run_of(cluster: str = "8xH100-SXM", **settings: object) -> RunSpec:
    return describe_run(MIXTURE, cluster, seq_len=4096, **{"expert": 8, **settings})  # type: ignore[arg-type]


def sent(run: RunSpec) -> int:
    """Bytes of tokens of a rank to and from its experts, without the counts of tokens."""
    found = [one for one in estimate_run(run).traffic if one.group == "expert"]
    assert [one.op for one in found] == ["all_to_all"]
    # 48 blocks, two calls in a forward, 8 bytes for each of 128 experts where the host reads them.
    counts = 48 * 8 * 128
    return found[0].bytes - counts


def counted(experts: int, chosen: int, groups: int) -> float:
    """Mean groups that have one of the chosen experts, over all choices."""
    each = experts // groups
    choices = [*combinations(range(experts), chosen)]
    return sum(len({one // each for one in choice}) for choice in choices) / len(choices)


@pytest.mark.parametrize(("degree", "in_node", "groups"), [(4, 8, 4), (8, 8, 8), (8, 2, 4)])
def test_a_token_goes_once_to_each_device_or_node(degree: int, in_node: int, groups: int) -> None:
    assert copies_among(degree, in_node)(8, 3) == pytest.approx(counted(8, 3, groups))


@pytest.mark.parametrize("dispatch", ["deepep", "hybridep"])
def test_traffic_is_that_of_the_copies(dispatch: str) -> None:
    torchs, librarys = sent(run_of()), sent(run_of(dispatch=dispatch))
    # Eight experts of a token are on 5.3 of eight devices.
    assert librarys / torchs == pytest.approx(copies_among(8, 8)(128, 8) / 8, rel=1e-6)
    # A token crosses to each of two nodes once.
    two = sent(run_of("2x8xH100-SXM@400Gbps", dispatch=dispatch, expert=16))
    assert two / torchs == pytest.approx(copies_among(16, 8)(128, 8) / 8, rel=1e-6)


def test_a_library_saves_time_and_takes_the_memory_of_torch() -> None:
    torchs, librarys = estimate_run(run_of()), estimate_run(run_of(dispatch="deepep"))
    assert torchs.time is not None
    assert librarys.time is not None
    assert librarys.time.step_s < torchs.time.step_s
    assert librarys.memory == torchs.memory


def test_software_decides_unless_the_strategy_does() -> None:
    for software, device, expected in (
        (None, "8xH100-SXM", "all-to-all"),
        ("megatron", "8xH100-SXM", "hybridep"),
        ("torchtitan", "8xH100-SXM", "deepep"),
        ("torchtitan", "8xA100-80GB", "all-to-all"),
    ):
        run = run_of(device, software=software)
        assert dispatch_of(run.strategy, run.cluster) == expected
        named = run_of(device, software=software, dispatch="all-to-all")
        assert dispatch_of(named.strategy, named.cluster) == "all-to-all"
    assert sent(run_of(software="megatron")) == sent(run_of(dispatch="hybridep"))
