"""DDP's buckets in time: everything is reduced once, and the head leaves first where it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.cost import Coefficients, Hardware, durations
from shardwise.predict.simulate import Durations
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

BANDWIDTH = 1e9
RANKS = 4
# Nothing but bytes takes time on the links.
FREE = Coefficients(
    matmul_efficiency=1.0, matmul_half_s=0.0, attention_efficiency=1.0, elementwise_factor=1.0,
    launch_s=0.0, link_efficiency=1.0, network_efficiency=1.0, hop_latency_s=0.0,
    network_latency_s=0.0, contention=0.0, optimizer_factor=0.0,
)  # fmt: skip


def priced(vocab: int, **strategy: Any) -> tuple[Durations, int]:
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": vocab}
    model = ModelSpec.read({"name": "m", "family": "llama", "max_positions": 64, **sizes})
    chosen = Strategy.read({"kind": "ddp", "param_dtype": "fp32", **strategy}).resolve(RANKS, RANKS)
    units = load_units(model, 64, chosen)
    hardware = Hardware(1e12, 1e11, BANDWIDTH, BANDWIDTH, devices_per_node=RANKS)
    return durations(units, Configurations.of([chosen]), hardware, FREE), units.numel


@pytest.mark.parametrize("vocab", [512, 4096, 65536])
@pytest.mark.parametrize("bucket", [None, 1, 4, 100])
def test_every_gradient_is_reduced_once(vocab: int, bucket: float | None) -> None:
    d, numel = priced(vocab, **({"ddp_bucket_mib": bucket} if bucket else {}))
    moved = float(d.head_reduce[0] + d.reduce.sum() + d.root_reduce[0])
    ring = 2 * (RANKS - 1) / RANKS
    assert moved == pytest.approx(ring * 4 * numel / BANDWIDTH, rel=1e-12)


def test_a_head_that_fills_the_first_bucket_leaves_before_any_block() -> None:
    # 4096 x 256 and the norm before it, in fp32: 4 MiB and a little; the rest is below 25 MiB.
    d, _ = priced(4096)
    assert d.head_reduce[0] * BANDWIDTH / 1.5 == pytest.approx(4 * (4096 * 256 + 256))
    assert np.count_nonzero(d.reduce) == 0
    assert d.root_reduce[0] > 0


def test_a_small_head_waits_for_a_block() -> None:
    # Half a MiB: the last block fills the first bucket, of 1 MiB, with it.
    d, _ = priced(512)
    assert d.head_reduce[0] == 0
    assert np.flatnonzero(d.reduce[0]).tolist() == [3]


def test_a_size_that_was_asked_for_holds_for_the_first_too() -> None:
    d, _ = priced(4096, ddp_bucket_mib=6)
    assert d.head_reduce[0] == 0
    assert d.reduce[0][3] > 0


def test_sharded_gradients_have_no_buckets() -> None:
    d, _ = priced(4096, kind="zero3", shard=2, replicate=2)
    assert d.head_reduce[0] == 0
    assert (d.reduce > 0).all()
