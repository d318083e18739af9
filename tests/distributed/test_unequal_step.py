"""The step of two ranks, of which one is half as fast, is predicted from each of them alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
from shardwise.spec.run import run_from_dict, write_run
from tests.distributed.paced_model import PACES
from tests.distributed.sources import SEQ_LEN
from tests.distributed.train_run import run_toml

# Seconds of a micro-batch. Their compute takes a hundredth of it.
FAST, SLOW = 0.3, 0.6
# What a rank does beside its micro-batches is small, and not priced.
CALIBRATION: dict[str, Any] = {
    "matmul_efficiency": 1.0, "matmul_half_s": 0.0, "attention_efficiency": 1.0,
    "elementwise_factor": 0.01, "launch_s": 0.0, "link_efficiency": 1.0, "network_efficiency": 1.0,
    "hop_latency_s": 0.0, "network_latency_s": 0.0, "contention": 0.0, "optimizer_factor": 0.01,
}  # fmt: skip


def device(rate: float) -> dict[str, Any]:
    """A CPU of so many FLOP/s."""
    return {
        "name": "CPU", "memory": "4GiB", "memory_bandwidth": "10GB/s", "link": "gloo",
        "link_bandwidth": "1GB/s", "peak": {"fp32": rate},
    }  # fmt: skip


def step_of(
    workers: Workers, folder: Path, cluster: dict[str, Any], **strategy: Any
) -> tuple[float, dict[str, Any]]:
    """Measured seconds of a step, and its predicted profile."""
    run = run_from_dict(
        {
            "model": "tests.distributed.paced_model:paced",
            "cluster": {**cluster, "calibration": CALIBRATION},
            "job": {"seq_len": SEQ_LEN},
            "strategy": {"param_dtype": "fp32", **strategy},
            "data": {"source": "tests.distributed.sources:equal"},
            "train": {"steps": 10, "checkpoint": False, "trackers": []},
        }
    )
    folder.mkdir()
    (folder / "run.toml").write_text(write_run(run))
    [ranks] = workers.run(run_toml, run.cluster.devices, [{"file": str(folder / "run.toml")}])
    assert all(rank.get("steps") == 10 for rank in ranks), ranks
    told, measured = (
        json.loads((folder / "runs" / "it" / f"{name}.json").read_text())
        for name in ("prediction", "measurement")
    )
    assert "parts" not in measured
    return measured["time"]["step_s"], told


@pytest.mark.timing
def test_the_slower_rank_gets_fewer_micro_batches_and_the_step_is_as_predicted(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    for name, pace in (("fast", FAST), ("slow", SLOW)):
        monkeypatch.setenv(PACES, str(pace))
        real, told = step_of(
            workers, tmp_path / name, {"device": device(1e9)}, kind="single", accumulate=2,
            micro_batch=2,
        )  # fmt: skip
        rates.append(1e9 * told["time"]["step_s"] / real)
    monkeypatch.setenv(PACES, f"{FAST},{SLOW}")
    parts = [{"device": device(rate), "devices": 1, "calibration": CALIBRATION} for rate in rates]
    cluster = {"device": device(rates[0]), "devices_per_node": 2, "parts": parts}
    shares = [{"devices": 1, "accumulate": 4}, {"devices": 1, "accumulate": 2}]
    found = {
        name: step_of(
            workers, tmp_path / name, cluster, kind="ddp", micro_batch=2, **fields
        )
        for name, fields in (("shares", {"shares": shares}), ("equal", {"accumulate": 3}))
    }  # fmt: skip
    for name, (real, told) in found.items():
        assert told["work"]["tokens"] == 6 * 2 * SEQ_LEN
        assert told["time"]["step_s"] == pytest.approx(real, rel=0.1), name
    # By the paces: 4 x 0.3 s and 2 x 0.6 s, against 3 x 0.6 s.
    assert found["shares"][0] < 0.75 * found["equal"][0]
    waiting = {name: told["parts"][0]["waiting_s"] for name, (_, told) in found.items()}
    assert waiting["shares"] < FAST < waiting["equal"]
