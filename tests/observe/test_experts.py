"""Uneven routing in traces of GPUs written by hand: named where tokens explain the waiting only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.diagnosis.experts import ExpertImbalance
from shardwise.observe.diagnosis.stragglers import Straggler
from shardwise.observe.diagnosis.verdict import Verdict
from shardwise.observe.diagnosis.verdicts import verdicts_of
from shardwise.observe.file.cache import cached_trace
from shardwise.observe.summary import summarise
from tests.observe.small import event

RANKS, STEPS, WIDTH, MOVE = 4, 3, 64, 20
EVEN = (400,) * RANKS


@dataclass(frozen=True, kw_only=True)
class Run:
    """Times in microseconds: attention by rank, and the time of a token in the experts of a rank.

    `received` has the tokens that each rank's experts get in each layer, `sent` those of its own.
    """

    received: Sequence[Sequence[int]]
    sent: Sequence[int] = EVEN
    attention: Sequence[int] = (300,) * RANKS
    pace: Sequence[float] = (1,) * RANKS


def write(folder: Path, run: Run) -> list[Path]:
    """The traces of the ranks, which share a clock."""
    events: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
    now = [1000.0] * RANKS

    def compute(times: Sequence[float]) -> None:
        for rank, time in enumerate(times):
            events[rank].append(event("gemm", now[rank], time))
            now[rank] += time

    def exchange(sent: Sequence[int], received: Sequence[int]) -> None:
        end = max(now) + MOVE
        for rank in range(RANKS):
            about: dict[str, Any] = {
                "Collective name": "all_to_allv",
                "In msg nelems": sent[rank],
                "Out msg nelems": received[rank],
                "dtype": "BFloat16",
                "Group size": RANKS,
                "Process Group Name": "7",
                "Process Group Description": "mesh_ep",
                "Process Group Ranks": str([*range(RANKS)]),
            }
            name = "ncclDevKernel_SendRecv"
            events[rank].append(event(name, now[rank], end - now[rank], stream=20, **about))
            now[rank] = end

    for step in range(STEPS):
        begin = now[0]
        for layer in run.received:
            tokens, own = [n * WIDTH for n in layer], [n * WIDTH for n in run.sent]
            compute(run.attention)
            # Every rank tells the others how many tokens it sends.
            exchange([RANKS] * RANKS, [RANKS] * RANKS)
            exchange(own, tokens)
            compute([n * pace for n, pace in zip(layer, run.pace, strict=True)])
            exchange(tokens, own)
        for rank in range(RANKS):
            mark = event(f"ProfilerStep#{step}", begin, now[rank] - begin, "gpu_user_annotation")
            events[rank].append(mark)
    paths = []
    for rank in range(RANKS):
        about = {"distributedInfo": {"rank": rank, "world_size": RANKS}}
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps({**about, "traceEvents": events[rank]}))
        paths.append(path)
    return paths


def causes(folder: Path, run: Run) -> dict[str, Verdict]:
    return {verdict.cause: verdict for verdict in verdicts_of(summarise(write(folder, run)))}


def test_the_rank_whose_experts_get_most_is_a_straggler_with_that_reason(tmp_path: Path) -> None:
    layer = (300, 300, 700, 300)
    found = causes(tmp_path, Run(received=(layer,) * 3))
    straggler = found["straggler"]
    assert isinstance(straggler, Straggler)
    assert (straggler.ranks, straggler.reason) == (("rank 2",), "experts")
    assert straggler.late[0].load == pytest.approx(700 / 400)
    assert (straggler.spent_ns, straggler.others_spent_ns) == (3 * 700e3, 3 * 300e3)
    assert straggler.saves_ns == pytest.approx(3 * (700e3 - 300e3))
    assert straggler.every_step
    assert "expert_imbalance" not in found


def test_another_rank_in_every_layer_is_imbalance_without_a_straggler(tmp_path: Path) -> None:
    layers = [[1000 if rank == busiest else 200 for rank in range(RANKS)] for busiest in (0, 3, 1)]
    found = causes(tmp_path, Run(received=layers))
    imbalance = found["expert_imbalance"]
    assert isinstance(imbalance, ExpertImbalance)
    assert set(imbalance.ranks) == {"rank 0", "rank 1", "rank 3"}
    assert imbalance.load == pytest.approx(1000 / 400)
    assert [one.load for one in imbalance.busy] == [pytest.approx(1400 / 1200)] * 3
    # Three of four ranks wait in each layer.
    assert imbalance.saves_ns == pytest.approx(3 * (1000e3 - 200e3) * 3 / 4)
    assert "straggler" not in found
    # All waiting has this cause.
    assert "ranks_out_of_step" not in found


def test_metrics_of_the_run_give_the_load_to_plan_with(tmp_path: Path) -> None:
    traces = tmp_path / "traces" / "step-000004"
    traces.mkdir(parents=True)
    lines = [{"step": 1, "loss": 3.0}, *({"step": n, "rank_load": n / 2} for n in (2, 3, 5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    straggler = causes(traces, Run(received=((300, 300, 700, 300),) * 3))["straggler"]
    assert isinstance(straggler, Straggler)
    assert straggler.logged_load == 1.5
    assert "job.routing = 1.50" in straggler.fix


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run(received=(EVEN,) * 3), None),
        # A slow device with as many tokens as the others.
        (Run(received=(EVEN,) * 3, pace=(1, 1, 2, 1)), "compute"),
        # More tokens, which cost no time.
        (Run(received=((300, 300, 700, 300),) * 3, pace=(7 / 3, 7 / 3, 1, 7 / 3)), None),
        # Longer sequences on one rank, and even experts.
        (Run(received=(EVEN,) * 3, sent=(300, 300, 700, 300), attention=(300, 300, 700, 300)),
         "compute"),
    ],
    ids=["even", "slow device", "tokens without time", "long sequences"],
)  # fmt: skip
def test_tokens_are_not_blamed_where_they_explain_nothing(
    tmp_path: Path, run: Run, reason: str | None
) -> None:
    found = causes(tmp_path, run)
    assert "expert_imbalance" not in found
    straggler = found.get("straggler")
    assert (straggler.reason if isinstance(straggler, Straggler) else None) == reason


def test_a_cached_trace_has_the_sizes_of_both_directions(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path, *_ = write(tmp_path, Run(received=((300, 300, 700, 300),)))
    parsed, loaded = (cached_trace(path, tmp_path / "cache") for _ in range(2))
    for trace in (parsed, loaded):
        assert trace.sent[:3].tolist() == [RANKS, 400 * WIDTH, 300 * WIDTH]
        assert trace.received[:3].tolist() == [RANKS, 300 * WIDTH, 400 * WIDTH]
