"""Traces of real processes with uneven routing: the rank with the most tokens is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.diagnosis.experts import ExpertImbalance
from shardwise.observe.diagnosis.stragglers import Straggler
from shardwise.observe.diagnosis.verdict import Verdict
from shardwise.observe.diagnosis.verdicts import verdicts_of
from shardwise.observe.summary import summarise
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.skewed_trace import STEPS, trace_case

SIZES: dict[str, Any] = {"layers": 2, "hidden": 256, "head_dim": 32, "ffn": 704, "vocab": 503}
# Processes, which of them gets the most tokens, and its tokens over the mean.
CASES = [(2, 1, 1.5), (2, 0, 1.75), (4, 2, 1.75), (2, 0, 1.0), (4, 0, 1.0)]


def blamed(verdicts: list[Verdict]) -> list[tuple[str, float | None]]:
    """Ranks that are named for the tokens that their experts got, and their load."""
    found = [(one.name, one.load) for verdict in verdicts if isinstance(verdict, ExpertImbalance)
             for one in verdict.busy]  # fmt: skip
    return found + [
        (one.name, one.load) for verdict in verdicts if isinstance(verdict, Straggler)
        for one in verdict.late if one.reason == "experts"
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("processes", "busiest", "load"), CASES)
def test_the_rank_whose_experts_get_most_tokens_is_named(
    processes: int, busiest: int, load: float, workers: Workers, tmp_path: Path
) -> None:
    strategy = Strategy.read(
        {"kind": "zero3", "expert": processes, "micro_batch": 4, "param_dtype": "fp32"}
    ).resolve(processes, processes)
    model = reduced("mixtral", experts=8, experts_per_token=2, **SIZES)
    case = {
        "model": model.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": 128,
        "busiest": busiest,
        "load": load,
        "folder": str(tmp_path),
    }
    workers.run(trace_case, processes, [case])
    summary = summarise(sorted(tmp_path.glob("*.json")))
    # A forward and a backward of each layer.
    assert [len(rank.expert_passes.call) for rank in summary.ranks] == [
        2 * SIZES["layers"] * STEPS
    ] * processes
    named = [(f"rank {busiest}", load)] if load > 1 else []
    assert blamed(verdicts_of(summary)) == named
