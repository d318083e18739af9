"""Bytes, calls and memory of compressed gradients, by arithmetic on the shapes of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import Memory, predict_memory
from shardwise.predict.traffic import predict_traffic
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from tests.predict.toy import resolve
from tests.units.reduced import reduced

UNITS = decoder_units(
    reduced("llama", layers=3, hidden=128, head_dim=32, ffn=352, vocab=503), 32, "bf16"
)
SHAPES = [p.shape for unit in UNITS.units for p in unit.parameters]
POWERSGD: dict[str, Any] = {"compress": "powersgd"}


def messages(**settings: Any) -> tuple[int, int]:
    """Calls and bytes of the all-reduces of a step on 4 devices."""
    [one] = predict_traffic(UNITS, Configurations.of([resolve("ddp", 4, **settings)]))
    assert (one.op, one.group) == ("all_reduce", "replicate")
    return int(one.calls[0]), int(one.bytes[0])


def memory(**settings: Any) -> Memory:
    return predict_memory(UNITS, Configurations.of([resolve("ddp", 4, **settings)]))


@pytest.mark.parametrize("bucket", [None, 0.25])
def test_sixteen_bits_are_half_the_bytes(bucket: float | None) -> None:
    calls, plain = messages(ddp_bucket_mib=bucket)
    for compress in ("bf16", "fp16"):
        assert messages(compress=compress, ddp_bucket_mib=bucket) == (calls, plain // 2)


@pytest.mark.parametrize("rank", [1, 4, 40, 500])
def test_powersgd_sends_factors_of_what_they_compress(rank: int) -> None:
    sent = 0
    for shape in SHAPES:
        rows, columns = shape if len(shape) == 2 else (shape[0], 1)
        factors = (rows + columns) * min(rows, columns, rank)
        # What would not be halved is sent as it is.
        sent += factors if 2 * factors < rows * columns else rows * columns
    calls, _ = messages()
    assert messages(**POWERSGD, powersgd_rank=rank) == (3 * calls, 4 * sent)


def test_powersgd_keeps_an_error_and_factors() -> None:
    _, plain = messages()
    _, sent = messages(**POWERSGD)
    vectors = 4 * sum(shape[0] for shape in SHAPES if len(shape) == 1)
    held, without = memory(**POWERSGD), memory()
    kept = [one.phases["optimizer step"]["reduce_buffers"][0] for one in (held, without)]
    assert kept == [plain + sent - vectors, 0]


def test_rounded_gradients_may_wait_for_the_network() -> None:
    _, plain = messages()
    # With few activations the end of the backward is near the peak.
    assert memory(compress="bf16").pooled_bytes[0] > 0.8 * plain / 2
    assert memory(compress="bf16").pooled_bytes[0] <= plain / 2
    # Nothing waits there beside the activations of many tokens.
    assert memory(compress="bf16", micro_batch=64).pooled_bytes[0] == 0
    assert memory().pooled_bytes[0] == memory(**POWERSGD).pooled_bytes[0] == 0


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("zero3", {"compress": "bf16"}, "kind 'zero3' has none"),
        ("ddp", {"compress": "bf16", "states": "bf16"}, "gradients are in bf16"),
        ("ddp", {**POWERSGD, "states": "bf16"}, "in fp32"),
        ("ddp", {**POWERSGD, "tensor": 2}, "tensor parallelism"),
        ("ddp", {**POWERSGD, "accumulate": 2, "grad_sync": "every"}, "grad_sync"),
        ("ddp", {**POWERSGD, "powersgd_start": 1}, "greater than or equal to 2|at least 2"),
    ],
)
def test_what_torch_cannot_compress_is_refused(
    kind: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        Strategy.read({"kind": kind, **settings})
