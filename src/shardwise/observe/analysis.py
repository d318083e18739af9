"""The analysis of a run's traces as one record: verdicts first, every figure as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.observe.diagnosis.communication import transfers_of
from shardwise.observe.diagnosis.stalls import stalls_of
from shardwise.observe.diagnosis.verdict import Health, Verdict, mean
from shardwise.observe.diagnosis.verdicts import health_of, verdicts_of
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Rules
from shardwise.observe.summary import Summary, summarise
from shardwise.spec.cluster import ClusterSpec
from shardwise.step.notebook import html_of


@dataclass(frozen=True)
class Trace:
    """Profiler traces of a run, one per rank: where the time of a step goes, and why."""

    summary: Summary
    # Causes of lost time, the largest saving first; empty for a healthy run.
    verdicts: tuple[Verdict, ...]
    health: Health
    rules: Rules
    cluster: ClusterSpec | None

    @property
    def waiting_ns(self) -> float | None:
        """Nanoseconds per step of exposed communication spent waiting for others, mean over ranks.

        None for a single rank, or if no collective could be matched across ranks.
        """
        if self.summary.joined is None:
            return None
        pairs = zip(self.summary.ranks, transfers_of(self.summary), strict=True)
        stalls = [(rank, stalls_of(rank, moved, self.rules.thresholds)) for rank, moved in pairs]
        return mean([rank.per_step(float(one.waiting_ns.sum())) for rank, one in stalls])

    def __repr__(self) -> str:
        if not self.verdicts:
            return f"Trace: {self.health.words()}"
        first = self.verdicts[0].explain(self.health)
        return f"Trace: {first.result}\n  {first.evidence}\n  Suggested fix: {first.fix}"

    def _repr_html_(self) -> str:
        return html_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The analysis as `--json` prints it.

        Times, calls and bytes of ranks and verdicts are per step, averaged over the profiled
        steps; `full_trace`, `steps` and `matched` say what they cover.
        """
        joined = self.summary.joined
        return {
            "schema": 2,
            "kind": "measured",
            "step_ns": self.health.step_ns,
            "profiled_steps": self.health.steps,
            "healthy": self.health.healthy,
            "verdicts": [verdict.to_dict(self.health) for verdict in self.verdicts],
            "ranks": [_rank_dict(rank) for rank in self.summary.ranks],
            "matched": None
            if joined is None
            else {
                "collectives": joined.collectives,
                "mean_ns": joined.mean_ns,
                "transfer_ns": joined.transfer_ns,
                "last_to_arrive": joined.last_to_arrive().tolist(),
                "offset_ns": joined.offset_ns.tolist(),
                "unmatched": joined.unmatched,
            },
        }


def read_traces(
    files: list[Path],
    rules: Rules | None = None,
    cluster: ClusterSpec | None = None,
    *,
    timelines: bool = False,
    cache: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read the traces of a run's ranks, and find the causes of lost time.

    With `cluster`, kernels and transfers are compared with its peaks. `timelines` keeps the
    timeline of each rank, which plots need. `progress` gets the number of files read so far.
    """
    chosen = rules or Rules()
    summary = summarise(files, chosen, timelines=timelines, cache=cache, progress=progress)
    return Trace(
        summary,
        tuple(verdicts_of(summary, chosen.thresholds, cluster)),
        health_of(summary, chosen.thresholds),
        chosen,
        cluster,
    )


def _rank_dict(rank: RankSummary) -> dict[str, Any]:
    """The figures of one rank as `--json` prints them."""

    def per_step(values: dict[str, Any]) -> dict[str, Any]:
        """Divide integers by the number of profiled steps; `group_size` stays as it is."""
        return {
            key: rank.per_step(value) if isinstance(value, int) and key != "group_size" else value
            for key, value in values.items()
        }

    return {
        "path": str(rank.path),
        "rank": rank.rank,
        "device": "cpu" if rank.on_cpu else "accelerator",
        **per_step(rank.profiled._asdict()),
        "overlap": rank.profiled.overlap,
        "steps": [step._asdict() | {"overlap": step.overlap} for step in rank.steps],
        "full_trace": rank.full_trace._asdict() | {"overlap": rank.full_trace.overlap},
        "collectives": [
            per_step(one._asdict()) | {"bus_bytes_per_s": one.bus_bytes_per_s}
            for one in rank.collectives
        ],
        "units": [per_step(unit._asdict()) for unit in rank.units],
        "micro_batches": [kind._asdict() for kind in rank.micro_batches],
        "idle": per_step(rank.host.idle._asdict()),
        "data_ns": rank.per_step(rank.host.data_ns),
        "matmul": None
        if rank.matmul is None
        else rank.matmul._asdict() | {"flops_per_s": rank.matmul.flops_per_s},
        "slowdown": None if rank.slowdown is None else rank.slowdown._asdict(),
        "problems": rank.problems,
    }
