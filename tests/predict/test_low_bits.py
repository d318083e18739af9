"""Products of linear layers in 8 or 4 bits: what they take, what is gathered, and where not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise
from shardwise.predict.configurations import Configurations
from shardwise.predict.traffic import predict_traffic
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units
from tests.command import shardwise as command

# A block of 61,440 elements in linear layers and 128 in norms.
MODEL = ModelSpec.read(
    {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
     "ffn": 256, "vocab": 256, "max_positions": 128, "tied": False}
)  # fmt: skip


def _gathered(**changes: object) -> float:
    """Bytes of one gather of a block: what a second block adds."""
    strategy = Strategy.read({"kind": "zero3", "micro_batch": 1, **changes}).resolve(2, 2)
    units = load_units(MODEL, 128, strategy)
    calls, moved = 0, 0
    for sign, blocks in ((1, units.blocks), (-1, units.blocks[:1])):
        (gathers,) = (
            one
            for one in predict_traffic(replace(units, blocks=blocks), Configurations.of([strategy]))
            if one.op == "all_gather"
        )
        calls += sign * int(gathers.calls[0])
        moved += sign * int(gathers.bytes[0])
    return moved / calls


def test_gathers_in_8_bits_are_those_measured_with_torchao() -> None:
    """One byte per element of a linear layer, two per element of a norm: 61,696 of 123,136."""
    assert _gathered() == 123_136
    assert _gathered(linear_dtype="fp8") == 123_136
    assert _gathered(linear_dtype="fp8", low_bit_gather=True) == 61_696


def _priced(precision: str) -> tuple[float, shardwise.StepProfile]:
    found = shardwise.estimate(
        "llama-3-8b", "8xB200", "zero3", seq_len=8192, micro_batch=2, recompute="full",
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    assert found.time is not None
    assert found.time.compute_s is not None
    return found.time.compute_s, found


def test_products_in_fewer_bits_take_less_time_and_the_same_memory() -> None:
    """Products are most of this step, and their peak is twice as high; casts take some of that."""
    (wide_s, wide), (low_s, low) = _priced("bf16"), _priced("fp8")
    assert 0.5 < low_s / wide_s < 0.9
    assert low.memory == wide.memory
    assert low.traffic == wide.traffic


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [("8xA100-80GB", "fp8"), ("8xH100-SXM", "nvfp4"), ("8xH100-SXM", "mxfp8"), ("1x2xCPU", "fp8")],
)
def test_devices_without_such_products_are_refused(cluster: str, precision: str) -> None:
    with pytest.raises(SpecError, match=f"no products in {precision}|CPUs are not known"):
        shardwise.plan("llama-3-8b", cluster, precision=precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_dtype": "fp8", "param_dtype": "fp32"}, "needs param_dtype 'bf16'"),
        ({"low_bit_gather": True}, "needs linear_dtype 'fp8'"),
        ({"linear_dtype": "mxfp8", "low_bit_gather": True}, "needs linear_dtype 'fp8'"),
    ],
)
def test_what_does_not_go_together_is_told(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Strategy.read({"kind": "zero3", **changes})


def test_a_plan_says_what_stands_behind_it_and_a_run_is_refused() -> None:
    done = command("plan", "--model", "llama-3-8b", "--cluster", "8xH100-SXM",
                   "--precision", "fp8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "products in fp8" in done.stdout
    assert "fitted runs, not trained here" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    from shardwise.engine.parallelize import parallelize

    torch = pytest.importorskip("torch")
    strategy = Strategy.read({"kind": "single", "linear_dtype": "fp8"})
    with pytest.raises(SpecError, match="planned, not trained"):
        parallelize(torch.nn.Linear(4, 4), strategy)


def test_experts_that_are_divided_compute_in_fewer_bits_too() -> None:
    model = find_model("qwen3-30b-a3b")
    seconds = []
    for dtype in (None, "fp8"):
        strategy = Strategy(kind="zero2", expert=8, micro_batch=4, linear_dtype=dtype)
        units = load_units(model, 4096, strategy.resolve(8, 8))
        assert {part.linear_dtype for part in units.blocks[0].stage.parts} == {dtype}
        profile = shardwise.estimate(model, "8xH100-SXM", strategy, seq_len=4096)
        assert profile.time is not None
        seconds.append(profile.time.step_s)
    assert seconds[1] < seconds[0]
