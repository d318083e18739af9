"""A few runs of a known cluster: what is fitted predicts the others, and files read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.spec.catalogue import with_memory_here
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_cluster, write_cluster
from shardwise.spec.record import SpecError
from shardwise.spec.run import write_run
from shardwise.spec.strategy import Strategy
from tests.command import shardwise

pytest.importorskip("scipy")
from shardwise.observe.observation import Observation
from shardwise.trials.calibrate.fit import CPU, fit
from tests.calibrate.known import observed, run_of

FEW = [("ddp", 1), ("ddp", 4), ("zero2", 1), ("zero3", 1), ("zero3", 4), ("hsdp", 2)]
OTHERS = [("ddp", 2), ("zero2", 4), ("zero2", 2), ("zero3", 2), ("hsdp", 1), ("hsdp", 4)]


def test_six_runs_predict_the_rest() -> None:
    found = fit([observed(*each) for each in FEW])
    assert max(abs(error) for error in found.errors) < 0.02
    k = CPU._replace(**found.calibration.coefficients())
    for kind, batch in OTHERS:
        for network in ("500Mbps", "1Gbps", "4Gbps"):
            one = observed(kind, batch, network)
            parts = one.predict(k, one.run.cluster)
            assert parts.step_s == pytest.approx(one.step_s, rel=0.05), (kind, batch, network)


def test_runs_with_tensor_parallelism_tell_what_its_collectives_cost() -> None:
    few = [("zero3", 1), ("hsdp", 2), ("tensor inside", 1), ("tensor across", 2)]
    model = "qwen2.5-0.5b"
    found = fit([observed(*each, model=model) for each in few])
    assert max(abs(error) for error in found.errors) < 0.02
    k = CPU._replace(**found.calibration.coefficients())
    for kind in ("tensor inside", "tensor across"):
        for network in ("500Mbps", "4Gbps"):
            one = observed(kind, 4, network, model)
            parts = one.predict(k, one.run.cluster)
            assert parts.step_s == pytest.approx(one.step_s, rel=0.05), (kind, network)


def test_a_calibrated_cluster_reads_back_and_is_used(tmp_path: Path) -> None:
    found = fit([observed(*each) for each in FEW])
    cluster = find_cluster("2x2xCPU@1Gbps").but(calibration=found.calibration)
    file = tmp_path / "cluster.toml"
    file.write_text(write_cluster(cluster))
    assert find_cluster(str(file)) == cluster
    older = write_cluster(cluster).replace("fused = 0.0", "compiled_elementwise = 0.4")
    (tmp_path / "older.toml").write_text(older.replace("level = ", "long_attention = "))
    kept = find_cluster(str(tmp_path / "older.toml")).calibration
    assert kept == found.calibration.but(fused=1.0)
    done = shardwise(
        "estimate", "--model", "gpt2", "--cluster", str(file), "--strategy", "zero3",
        "--seq-len", "128", "--precision", "fp32", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = observed("zero3", 1)
    assert json.loads(done.stdout)["time"]["step_s"] == pytest.approx(one.step_s, rel=0.03)


def write_folder(folder: Path, one: Observation, cluster: ClusterSpec | None = None) -> Path:
    folder.mkdir()
    run = one.run if cluster is None else one.run._replace(cluster=cluster)
    (folder / "run.toml").write_text(write_run(run))
    (folder / "measurement.json").write_text(json.dumps({"time": {"step_s": one.step_s}}))
    return folder


def test_the_command_writes_a_cluster_and_refuses_to_mix(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / f"{kind}-{batch}", observed(kind, batch))
               for kind, batch in FEW[:4]]  # fmt: skip
    output = tmp_path / "cluster.toml"
    words = ["calibrate", "-o", str(output)]
    given = [word for folder in folders for word in ("--from-run", str(folder))]
    done = shardwise(*words, *given)
    assert done.returncode == 0, done.stderr
    assert "calibrated on 4 runs" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[:-1]) <= 80
    assert find_cluster(str(output)).calibration is not None
    other = write_folder(tmp_path / "other", observed("ddp", 1, "2Gbps"))
    mixed = [*words, *given, "--from-run", str(other)]
    done = shardwise(*mixed)
    assert done.returncode == 2
    assert "2x2xCPU@1Gbps and 2x2xCPU@2Gbps" in done.stderr
    (other / "measurement.json").write_text("{}")
    done = shardwise(*mixed)
    assert done.returncode == 2
    assert "measurement.json has no step time" in done.stderr


def test_a_run_keeps_what_was_calibrated_for_its_kind_of_device() -> None:
    torch = pytest.importorskip("torch")
    from shardwise.trainer.start import for_actual_processes

    found = fit([observed(*each) for each in FEW[:2]])
    alone = run_of("ddp", 1)
    here = with_memory_here(find_cluster("1x1xCPU")).but(calibration=found.calibration)
    strategy = Strategy(kind="single", param_dtype="fp32")
    run = alone._replace(cluster=here, strategy=strategy)
    kept = for_actual_processes(run, torch.device("cpu")).cluster
    assert kept.calibration == found.calibration
    assert kept.device == here.device
    gpu = find_cluster("1x1xH100-SXM").but(calibration=found.calibration)
    moved = for_actual_processes(run._replace(cluster=gpu), torch.device("cpu")).cluster
    assert moved.calibration is None
    assert moved.device.is_cpu
    with pytest.raises(SpecError, match="names CPUs"):
        for_actual_processes(run, torch.device("cuda"))


def test_nothing_to_fit_is_said() -> None:
    with pytest.raises(SpecError, match="--from-run"):
        fit([])
