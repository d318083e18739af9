"""Models that their users wrapped with peft: what is predicted of them is what happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT
from tests.distributed.launch import results, torchrun
from tests.distributed.test_integrations import traffic
from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
from tests.distributed.agreement import PEAK_TOLERANCE
from tests.distributed.peft_run import own_loop

SCRIPTS = ROOT / "tests" / "distributed"
DORA = {"lora": {"use_dora": True}}


def assert_as_predicted(found: dict[str, Any], shard: int) -> None:
    """Collectives and state bytes exact, the peak within its bound."""
    predicted, measured = found["predicted"], found["measured"]
    assert traffic(predicted) == traffic(measured)
    trained = predicted["model"]["trained_parameters"]
    assert 0 < trained < 0.05 * predicted["model"]["parameters"]
    terms = [one["memory"]["terms"] for one in (predicted, measured)]
    for term in ("parameters", "optimizer"):
        assert terms[0][term] == terms[1][term]
    # Two moments in fp32 of what is trained, and of nothing else.
    assert terms[1]["optimizer"] == 2 * 4 * trained / shard
    peaks = [one["memory"]["peak_allocated_bytes"] for one in (predicted, measured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=PEAK_TOLERANCE)


@pytest.mark.parametrize(
    ("wrap", "base", "more"),
    [
        ("ddp", "bfloat16", {"accumulate": 2}),
        ("fully_shard", "bfloat16", {}),
        pytest.param("ddp", "float32", {}, marks=pytest.mark.nightly),
        pytest.param("fully_shard", "float32", {"accumulate": 2}, marks=pytest.mark.nightly),
        pytest.param("fully_shard:bf16", "bfloat16", {}, marks=pytest.mark.nightly),
        pytest.param("fully_shard:bf16", "bfloat16", DORA, marks=pytest.mark.nightly),
        pytest.param("zero3", "bfloat16", {"accumulate": 2}, marks=pytest.mark.nightly),
        pytest.param("zero2", "float32", {}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_an_own_loop(wrap: str, base: str, more: dict[str, Any], workers: Workers) -> None:
    [ranks] = workers.run(own_loop, 2, [{"wrap": wrap, "base": base, **more}])
    for found in ranks:
        assert_as_predicted(found, 1 if wrap == "ddp" else 2)
        assert found["state_bytes"] == found["predicted"]["memory"]["terms"]["optimizer"]
        assert found["parameter_bytes"] == found["predicted"]["memory"]["terms"]["parameters"]
        assert found["trained"] == found["predicted"]["model"]["trained_parameters"]
        # Frozen weights have no states and stay as they are.
        assert found["frozen"]
        assert not {*found["with_states"], *found["changed"]} & {*found["frozen"]}
        assert found["changed"]


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
@pytest.mark.parametrize("words", [(), ("fsdp2",)], ids=["ddp", "fsdp2"])
def test_the_trainer(words: tuple[str, ...], base: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = (str(SCRIPTS / "integrations_run.py"), str(SCRIPTS / "peft_trainer.py"))
    shown = torchrun(2, *script, *words, folder=tmp_path, BASE=base)
    assert "Collectives per step" in shown
    assert_as_predicted(results(shown)[0], 2 if words else 1)
