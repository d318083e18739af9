"""The same promises on GPUs, for whoever has some: `pytest -m cuda`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import shardwise
from tests.distributed.runs import losses, train, write

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prediction_against_measurement(tmp_path: Path, kind: str, dtype: str) -> None:
    file = write(tmp_path, kind=kind, dtype=dtype, steps=12, train="trackers = []")
    file.write_text(file.read_text().replace("1x2xCPU", "2xH100-SXM"))
    train(file, "--nproc", "2")
    folder = tmp_path / "runs" / "it"
    predicted = json.loads((folder / "prediction.json").read_text())
    measured = json.loads((folder / "measurement.json").read_text())

    def by_operation(profile: dict[str, list[dict[str, int]]]) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for one in profile["traffic"]:
            entry = found.setdefault((one["op"], one["group_size"]), [0, 0])
            entry[0] += one["calls"]
            entry[1] += one["bytes"]
        return found

    assert by_operation(measured) == by_operation(predicted)
    # The caching allocator rounds every tensor up to 512 bytes, which shows in a model this small.
    peak = measured["memory"]["peak_allocated_bytes"]
    assert predicted["memory"]["peak_allocated_bytes"] == pytest.approx(peak, rel=0.15)


def test_a_gpu_learns_what_a_cpu_does(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        settings = f'device = "{device}"\nmeta_init = false\nmeasure = false\ntrackers = []'
        file = write(tmp_path / device, steps=6, log_every=1, train=settings)
        if device == "cuda":
            file.write_text(file.read_text().replace("1x2xCPU", "2xH100-SXM"))
        train(file, "--nproc", "2")
        found[device] = losses(tmp_path / device)
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=0.05)
    assert found["cuda"][-1] < found["cuda"][0]


def test_what_gpus_and_their_links_reach_is_measured(tmp_path: Path) -> None:
    done = shardwise("calibrate", "--nproc", "2", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    machine = found["machine"]
    assert machine["backend"] == "nccl"
    rates = {(p["dtype"], p["edge"]): p["flops_per_s"] for p in machine["matmul"]}
    largest = max(edge for _, edge in rates)
    # Tensor cores make half precision faster, and small products do not fill a GPU.
    assert rates["bf16", largest] > rates["fp32", largest]
    assert rates["bf16", largest] > rates["bf16", 128]
    by_name = {one["operation"]: one["rate"] for one in machine["collectives"]}
    # A ring scatters as fast as it gathers, unlike Gloo.
    assert by_name["reduce_scatter"] > by_name["all_gather"] / 2
