"""Instances of providers: their figures, and clusters that are named by them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shardwise.cli.complete import clusters
from shardwise.spec import catalogue
from shardwise.spec.instance import Instance, find_instance, instances
from shardwise.spec.lookup import cluster_from_table, find_cluster, write_cluster
from shardwise.spec.quantity import parse_rate
from shardwise.spec.record import SpecError
from shardwise.spec.run import run_from_dict, run_table

# Names of the list that are no names of this catalogue's devices: both machines have this edition.
EDITIONS = {"RTX-PRO-6000": "RTX-PRO-6000-Server"}


def test_every_instance_has_a_known_device_and_sources() -> None:
    assert len(instances()) >= 60
    assert len({name.lower() for name in instances()}) == len(instances())
    assert not {name.lower() for name in instances()} & {d.lower() for d in catalogue.devices()}
    for name, instance in instances().items():
        assert catalogue.find_device(instance.device or "").name == instance.device, name
        assert (instance.usd_per_hour is None) == (instance.priced is None), name
        for figure in ("network", "usd_per_hour"):
            assert (getattr(instance, figure) is None) == (figure not in instance.source), name
        cluster = find_cluster(f"3x{name.upper()}")
        assert cluster.instance == name
        assert (cluster.nodes, cluster.devices_per_node) == (3, instance.gpus)
        assert cluster.device == catalogue.find_device(instance.device or "")


def test_every_row_of_the_published_list_is_there(shared: Path) -> None:
    listed = shared / "data" / "instances.csv"
    if not listed.exists():
        pytest.skip("needs the published list of instances beside the project")
    rows = list(csv.DictReader(listed.read_text(encoding="utf-8").splitlines()))
    named = {(one.provider, one.offered_as or one.name): one for one in instances().values()}
    refused = 0
    for row in rows:
        key = (row["provider"], row["name"])
        if "not a GPU" in row["note"]:
            refused += 1
            assert key not in named
            continue
        same_figures(named.pop(key), row)
    assert refused == 2
    assert not named, "nothing is here that the list does not have"


def same_figures(instance: Instance, row: dict[str, str]) -> None:
    assert instance.device == EDITIONS.get(row["gpu"], row["gpu"])
    assert instance.gpus == int(row["gpus"])
    network = row["network_gbps_per_node"]
    assert instance.network == (parse_rate(f"{network}Gbps") if network else None)
    for figure in ("usd_per_hour", "usd_per_hour_spot"):
        ours = instance.usd_per_hour if figure == "usd_per_hour" else instance.spot_usd_per_hour
        assert ours == (float(row[figure]) if row[figure] else None)
    if instance.priced and "gpuhunt" not in row["source"]:
        assert f"({instance.priced})" in row["source"]
    device = catalogue.find_device(instance.device or "")
    nominal = float(row["gpu_memory"].removesuffix("GB")) * 2**30
    assert device.memory == pytest.approx(nominal, rel=0.01)
    if "one way" in row["intra_link"]:
        rate = row["intra_link"].rpartition(", ")[2].removesuffix(" one way").replace(" ", "")
        assert device.link_bandwidth == parse_rate(rate)


@pytest.mark.parametrize(
    ("named", "spelled"),
    [
        ("p5.48xlarge", "1x8xH100-SXM@400Gbps"),
        ("4xp5.48xlarge", "4x8xH100-SXM@400Gbps"),
        ("2xA3-megaGPU-8g", "2x8xH100-SXM@200Gbps"),
        ("2 x a3-megagpu-8g @ 400Gbps", "2x8xH100-SXM@400Gbps"),
        ("18xgb200-nvl72", "18x4xGB200@400Gbps"),
        ("2xrunpod-8x-rtx-4090", "2x8xRTX-4090"),
        ("2x8H200.141S.176V@100Gbps", "2x8xH200-SXM@100Gbps"),
        ("BM.GPU.A100-v2.8", "1x8xA100-80GB@200Gbps"),
    ],
)
def test_an_instance_is_the_cluster_it_stands_for(named: str, spelled: str) -> None:
    found, other = find_cluster(named), find_cluster(spelled)
    assert str(found) == str(other)
    assert found.but(instance=None) == other
    assert find_instance(found.instance or "") is not None
    table = {"instance": found.instance, "nodes": found.nodes, "network": found.network}
    known = {key: value for key, value in table.items() if value is not None}
    assert cluster_from_table(known) == found


def test_a_run_keeps_its_instance_until_its_nodes_are_others(tmp_path: Path) -> None:
    run = run_from_dict({"model": "gpt2", "cluster": "2xp5.48xlarge"})
    assert run_from_dict(run_table(run)).cluster == run.cluster
    assert run.cluster.but(nodes=7).instance == run.cluster.but(network=1e9).instance
    assert run.cluster.but(devices_per_node=8).instance == "p5.48xlarge"
    assert run.cluster.but(devices_per_node=4).instance is None
    other = catalogue.find_device("H200-SXM")
    assert run.cluster.but(device=other).instance is None
    file = tmp_path / "cluster.toml"
    file.write_text(write_cluster(run.cluster))
    assert find_cluster(str(file)) == run.cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xp5.48xlrge", "did you mean 'p5.48xlarge'"),
        ("a3-mega", "did you mean 'a3-megagpu-8g'"),
        ("2xStandard_ND96isr_H200", "did you mean 'Standard_ND96isr_H200_v5'"),
        ("NVIDIA-H100", "did you mean 'H100-SXM'"),
        ("2x8xp5.48xlarge", "count machines only, such as 2xp5.48xlarge"),
        ("0xp5.48xlarge", "at least 1"),
        ("p5.48xlarge@fast", "network: cannot read"),
        ("trn1.32xlarge", "16 Trainium chips, which are not planned"),
        ("4xtpu-v5p-8", "4 TPU v5p chips"),
        ("xyzzy", "shardwise catalog instances"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find_cluster(text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"instance": "p5.48xlarge", "devices_per_node": 4}, "has 8 x H100-SXM, not 4"),
        ({"instance": "p5.48xlarge", "device": "A100-80GB"}, "not 8 x A100-80GB"),
        ({"instance": "H100-SXM"}, "is a device"),
        ({"instance": "nowhere"}, "unknown device or instance"),
        ({"instance": 3}, "cluster.instance: must be a text"),
        ({"instance": "4xp5.48xlarge", "nodes": 4}, "is no instance"),
    ],
)
def test_a_table_that_contradicts_its_instance_is_refused(
    table: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        cluster_from_table(table)


def test_shells_complete_instances_and_devices() -> None:
    assert clusters("4xp5.48") == ["4xp5.48xlarge"]
    assert clusters("Standard_ND96isr_h1") == ["Standard_ND96isr_H100_v5"]
    assert clusters("2xrunpod-8x-h100-s") == ["2xrunpod-8x-h100-sxm"]
    assert "4x8xH100-SXM" in clusters("4x8xH100")
    assert not [one for one in clusters("2x8x") if "xlarge" in one]
    assert clusters("2xtrn1") == []
