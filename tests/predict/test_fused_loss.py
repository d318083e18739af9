"""Fused losses: bytes by the packages' algorithms, against published peaks and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.predict.api import estimate_run
from shardwise.predict.compute import fused_s
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.program.fused_loss import liger_chunk_tokens
from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from tests.predict.toy import memory, resolve

MIB = 2**20
VOCABULARY, WIDTH = 128_256, 4_096
# Peak MiB of forward and backward of Liger's fused linear cross entropy on one A100, bf16, by
# tokens: linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, version 0.4.2.
PUBLISHED = {4_096: 4245.5, 8_192: 4467.0, 16_384: 4910.4, 32_768: 5794.6}

# Milliseconds of the same runs.
PUBLISHED_MS = {4_096: 121.43, 8_192: 166.71, 16_384: 277.12, 32_768: 511.06}


def chunk(tokens: int, vocabulary: int = VOCABULARY, width: int = WIDTH) -> int:
    return int(liger_chunk_tokens(np.array([float(tokens)]), vocabulary, width)[0])


@pytest.mark.parametrize("tokens", PUBLISHED)
def test_published_peaks_of_liger(tokens: int) -> None:
    """That benchmark holds two heads and a gradient from the step before.

    Version 0.4.2 holds 8 bytes per logit of a chunk, adds products in place, and each token has its
    hidden state, its gradient and that of the step before. Workspace of matrix products: 16 MiB.
    """
    head = VOCABULARY * WIDTH * 2
    logits = chunk(tokens) * VOCABULARY * 8
    peak = 4 * head + 3 * tokens * WIDTH * 2 + logits + 16 * MIB
    assert peak / MIB == pytest.approx(PUBLISHED[tokens], rel=0.001)


@pytest.mark.parametrize(("tokens", "measured_ms"), PUBLISHED_MS.items())
def test_published_times_of_liger(tokens: int, measured_ms: float) -> None:
    """Products as in a plain head, and what version 0.4.2 moves; nothing was fitted to these."""
    cluster = describe_run("llama-3-8b", "1xA100-80GB").cluster
    k, hardware = coefficients_for(cluster), hardware_of(cluster, "bf16")
    assert k is not None
    assert hardware is not None
    stage = decoder_units(catalogue.model("llama-3-8b"), 8192).root.stage
    count = np.array([float(tokens)])
    # Of each chunk: the weights are read twice, their gradient is read and written.
    moved = 14 * VOCABULARY * count + -(-tokens // chunk(tokens)) * VOCABULARY * WIDTH * 8
    flops = 3 * stage.matmul_flops
    seconds = fused_s(stage, flops, 3.0, count, moved, hardware, k)
    assert seconds[0] * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_chunks_of_liger() -> None:
    """Its own example, a vocabulary smaller than the width, and few tokens."""
    assert chunk(16_384, 32_000, 4_096) == 2_048
    assert chunk(1_000, 100, 4_096) == 1_000
    assert chunk(1, 128_256, 4_096) == 1
    assert chunk(5, 128_256, 64) == 1


def loss_terms(name: str, **settings: Any) -> dict[str, float]:
    """Bytes by term at the largest moment of head and loss in the forward, 8,192 tokens."""
    units = decoder_units(catalogue.model(name), 8192)
    fields = {"recompute": "full", **settings}
    ledger = memory(units, resolve("zero3", 8, **fields)).phases["end of forward"]
    return {term: float(size[0]) for term, size in ledger.items()}


@pytest.mark.parametrize(("name", "tokens"), [("llama-3.2-1b", 8192), ("llama-3-8b", 3 * 8192)])
def test_bytes_of_liger_in_sixteen_bits(name: str, tokens: int) -> None:
    """Logits of one chunk; the head's gradient, a product, and the product's copy in fp32."""
    model = catalogue.model(name)
    found = loss_terms(name, loss="fused", micro_batch=tokens // 8192)
    weights = model.vocab * model.hidden
    assert found["logits"] == chunk(tokens, model.vocab, model.hidden) * model.vocab * 2
    norm = 2 * model.hidden
    assert found["unsharded_gradients"] == 2 * weights + norm + 2 * weights + 4 * weights
    # What the final norm keeps, the head's input and its gradient, and the loss of each token; and
    # the input of every block.
    blocks = model.layers * model.hidden * 2
    ends = 2 * model.hidden * 4 + 4 + 2 * model.hidden
    assert found["activations"] == pytest.approx(tokens * (blocks + ends), rel=0.02)


def test_a_frozen_head_has_no_gradient() -> None:
    adapted = catalogue.model("llama-3-8b").but(adapter=Adapter(rank=8))
    units = decoder_units(adapted, 8192)
    strategy = resolve("zero3", 8, recompute="full", loss="fused")
    ledger = memory(units, strategy).phases["end of forward"]
    assert float(ledger["unsharded_gradients"][0]) == 0.0
    # The logits of the next chunk are computed before those of the last one are freed.
    assert float(ledger["logits"][0]) == 2 * chunk(8192) * VOCABULARY * 2


def test_cut_cross_entropy_holds_no_logits() -> None:
    """A sum for each token and a mean for each word, both in fp32."""
    found = loss_terms("llama-3-8b", loss="fused", loss_kernel="cut_cross_entropy")
    assert found["logits"] == 4 * 8192 + 4 * VOCABULARY
    assert found["unsharded_gradients"] == 0.0


def step_s(loss: str, **settings: Any) -> float:
    fields = {"kind": "zero3", "recompute": "full", "loss": loss, "micro_batch": 4, **settings}
    run = describe_run("llama-3.2-1b", "8xH100-SXM", seq_len=8192)
    run = run._replace(strategy=Strategy.read(fields)).resolved()
    time = estimate_run(run).time
    assert time is not None
    return time.step_s


def test_fused_kernels_move_fewer_bytes() -> None:
    """Plain moves 18 bytes per logit and pass: a cast to fp32, a softmax, and the loss reads it."""
    plain, liger = step_s("plain"), step_s("fused")
    cut = step_s("fused", loss_kernel="cut_cross_entropy")
    assert cut < plain
    tokens, weights = 4 * 8192, VOCABULARY * 2048
    saved = 3 * 18 * catalogue.step_coefficients()["elementwise_factor"] * VOCABULARY * tokens
    chunks = tokens / chunk(tokens, VOCABULARY, 2048)
    added = 6 * VOCABULARY * tokens + chunks * weights * 20
    bandwidth = 3.35e12
    assert plain - liger == pytest.approx((saved - added) / bandwidth, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tensor": 2}, "divided by vocabulary"),
        ({"loss_kernel": "cut_cross_entropy", "param_dtype": "fp32"}, "needs param_dtype"),
    ],
)
def test_what_fused_kernels_cannot_do_is_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        Strategy.read({"kind": "zero3", "loss": "fused", **settings})
