from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import catalogue
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.lookup import find_cluster
from shardwise.spec.record import SpecError

FIND = catalogue.find_device


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "network"),
    [
        ("4x8xH100-SXM@400Gbps", 4, 8, 50e9),
        ("4 x 8 x h100-sxm @ 400Gbps", 4, 8, 50e9),
        ("8xA100-80GB", 1, 8, None),
        ("64xA100-80GB@25GB/s", 8, 8, 25e9),
        ("H100-SXM", 1, 1, None),
        ("12500x8xH100-SXM@400Gbps", 12500, 8, 50e9),
        ("2xCPU", 2, 1, None),
        # PCIe cards without a network share one node, up to what servers take.
        ("8xRTX-4090", 1, 8, None),
        ("6xRTX-3090", 1, 6, None),
        ("8xRTX-4090@100Gbps", 2, 4, 12.5e9),
        ("16xRTX-4090", 4, 4, None),
        # NVLink fixes the size of a node.
        ("8xGB200", 2, 4, None),
    ],
)
def test_shorthand(text: str, nodes: int, per_node: int, network: float | None) -> None:
    cluster = parse_cluster(text, FIND)
    assert (cluster.nodes, cluster.devices_per_node, cluster.network) == (nodes, per_node, network)
    assert parse_cluster(str(cluster), FIND) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8xH100SXM", "did you mean 'H100-SXM'"),
        ("12xH100-SXM", "does not fill nodes of 8"),
        ("0x8xH100-SXM", "at least 1"),
        ("4x8xH100-SXM@fast", "network: cannot read"),
        ("4x8xH100-SXM@0Gbps", "more than 0"),
        ("", "cannot read"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_cluster(text, FIND)


def test_device_and_network_problems_come_together() -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster("4x8xH10-SXM@400Gbs", FIND)
    assert len(caught.value.problems) == 2


@given(st.text(max_size=40))
def test_the_parser_never_crashes(text: str) -> None:
    try:
        assert parse_cluster(text, FIND).devices >= 1
    except SpecError as error:
        assert error.problems


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[cluster]\ndevice = "H100-SXM"\nnodes = 4\ndevices_per_node = 8\nnetwork = "400Gbps"\n'
    )
    assert find_cluster(str(file)) == parse_cluster("4x8xH100-SXM@400Gbps", FIND)


def test_a_cluster_of_a_device_nobody_listed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "[cluster]\nnodes = 2\ndevices_per_node = 4\n[cluster.device]\nname = 'X1'\n"
        "memory = '100GiB'\nmemory_bandwidth = '1TB/s'\nlink_bandwidth = '100GB/s'\n"
        "[cluster.device.peak]\nbf16 = '500TFLOPS'\n"
    )
    cluster = find_cluster(str(file))
    assert cluster.device.capacity == 100 * 2**30
    assert cluster.device.peak_flops("bf16") == 500e12


@pytest.mark.parametrize(
    ("content", "message"),
    [("not toml [", "not valid TOML"), ("[cluster]\ndevise = 'H100-SXM'", "did you mean 'device'")],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(SpecError, match=message):
        find_cluster(str(file))


def test_a_missing_file_is_one_sentence() -> None:
    with pytest.raises(SpecError, match="cannot read nowhere.toml: No such file"):
        find_cluster("nowhere.toml")
