"""`shardwise trace`: where the time of a profiled run went, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.observe.rank.summary import RankSummary
    from shardwise.observe.summary import Summary
    from shardwise.observe.why.verdict import Verdict


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Traces of torch.profiler, one per rank, or a folder of them."),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(help="What it ran on, such as 4x8xH100-SXM@400Gbps: links and peaks."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML with name patterns (compute, communication, copy), thresholds."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="The run.toml of these traces: simulated against measured."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="With a run: write both steps for Perfetto, to a .json or .json.gz."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps what was read, as Parquet.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read traces: why a run is slow, what computed, waited and idled, and for whom.

    Ranks are joined: give the traces of as many as there are.
    """
    from shardwise.cli.beside import Beside
    from shardwise.observe.rules import Rules, read_rules
    from shardwise.observe.why.verdicts import verdicts_of
    from shardwise.report.trace import print_trace
    from shardwise.spec.lookup import find_cluster
    from shardwise.spec.record import SpecError

    known = find_cluster(cluster) if cluster else None
    chosen = read_rules(rules) if rules else Rules()
    paths = trace_files(files)
    beside = Beside.of(run, files)
    if timeline is not None:
        if beside is None:
            raise SpecError("--timeline: needs a run to simulate; add --run run.toml")
        beside.check(timeline)
    summary = read_summary(paths, chosen, cache, quiet=as_json)
    verdicts = verdicts_of(summary, chosen.thresholds, known)
    if as_json:
        found = summary_json(summary, verdicts)
        print_json(found | (beside.to_dict(summary.ranks[0]) if beside else {}))
    else:
        print_trace(summary, verdicts, chosen.thresholds, known)
        if beside is not None:
            beside.show(summary.ranks[0])
    if beside is not None and timeline is not None:
        beside.write(summary.ranks[0], chosen, timeline)


def read_summary(files: list[Path], rules: Any, cache: Path | None, *, quiet: bool) -> Summary:
    """Read many files under a bar, few without one."""
    from shardwise.observe.summary import summarise

    if quiet or len(files) < 4:
        return summarise(files, rules, cache=cache)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading traces", total=len(files))
        return summarise(
            files, rules, cache=cache, progress=lambda done: bar.update(task, completed=done)
        )


def summary_json(summary: Summary, verdicts: list[Verdict]) -> dict[str, Any]:
    """What a machine reads; nanoseconds of the whole trace unless a name says otherwise."""
    joined = summary.joined
    return {
        "schema": 1,
        "kind": "measured",
        "ranks": [_rank_json(rank) for rank in summary.ranks],
        "joined": None
        if joined is None
        else {
            "collectives": joined.collectives,
            "mean_ns": joined.mean_ns,
            "transfer_ns": joined.transfer_ns,
            "last_to_arrive": joined.last_to_arrive().tolist(),
            "offset_ns": joined.offset_ns.tolist(),
            "unmatched": joined.unmatched,
        },
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }


def _rank_json(rank: RankSummary) -> dict[str, Any]:
    return {
        "path": str(rank.path),
        "rank": rank.rank,
        "device": "cpu" if rank.on_cpu else "accelerator",
        **rank.whole._asdict(),
        "overlap": rank.whole.overlap,
        "steps": [step._asdict() | {"overlap": step.overlap} for step in rank.steps],
        "collectives": [
            one._asdict() | {"bus_bytes_per_s": one.bus_bytes_per_s} for one in rank.collectives
        ],
        "units": [unit._asdict() for unit in rank.units],
        "micro_batches": [kind._asdict() for kind in rank.micro_batches],
        "idle": rank.host.idle._asdict(),
        "data_ns": rank.host.data_ns,
        "matmul": None
        if rank.matmul is None
        else rank.matmul._asdict() | {"flops_per_s": rank.matmul.flops_per_s},
        "slowdown": None if rank.slowdown is None else rank.slowdown._asdict(),
        "problems": rank.problems,
    }


def trace_files(given: list[Path]) -> list[Path]:
    """Files as they are; of a folder its traces, of a run's folder those of its last profile."""
    from shardwise.observe.run_folder import TRACES, profiled_moments, traces_in
    from shardwise.spec.record import SpecError

    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        moments = profiled_moments(path / TRACES)
        if not moments and (path / "run.toml").is_file():
            raise SpecError(
                f"trace: the run in {path} was not profiled; use 'shardwise profile', or "
                "[train.profile] in its run.toml"
            )
        folder = moments[-1] if moments else path
        inside = traces_in(folder)
        if not inside:
            raise SpecError(f"trace: {path} holds no .json or .json.gz")
        found += inside
    return found
