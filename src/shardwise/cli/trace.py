"""`shardwise trace`: why a profiled run is slow, and where its time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.observe.diagnosis.verdict import Health, Verdict
    from shardwise.observe.rank.summary import RankSummary
    from shardwise.observe.rules import Rules
    from shardwise.observe.summary import Summary


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Traces of torch.profiler, one per rank, or a folder of them."),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster of the run (4x8xH100-SXM@400Gbps), to compare with its peaks."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML file with kernel name patterns and thresholds."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="run.toml of the traced run, to compare simulated and measured."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="With --run: write both steps for Perfetto (.json or .json.gz)."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder to cache parsed traces in, as Parquet.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse profiler traces: main cause of lost time, evidence, suggested fix.

    Give the traces of all ranks: only then can waiting be separated from transfer.
    """
    from shardwise.cli.run_prediction import RunPrediction
    from shardwise.observe.diagnosis.verdicts import health_of, verdicts_of
    from shardwise.observe.rules import Rules, read_rules
    from shardwise.report.trace import print_trace
    from shardwise.spec.lookup import find_cluster
    from shardwise.spec.record import SpecError

    known = find_cluster(cluster) if cluster else None
    chosen = read_rules(rules) if rules else Rules()
    paths = trace_files(files)
    prediction = RunPrediction.of(run, files)
    if timeline is not None:
        if prediction is None:
            raise SpecError("--timeline: needs a run to simulate; add --run run.toml")
        prediction.check(timeline)
    summary = read_summary(paths, chosen, cache, quiet=as_json)
    verdicts = verdicts_of(summary, chosen.thresholds, known)
    if as_json:
        result = summary_json(summary, verdicts, health_of(summary, chosen.thresholds))
        print_json(result | (prediction.to_dict(summary.ranks[0]) if prediction else {}))
    else:
        print_trace(summary, verdicts, chosen.thresholds, known)
        if prediction is not None:
            prediction.show(summary.ranks[0])
    if prediction is not None and timeline is not None:
        prediction.write(summary.ranks[0], chosen, timeline)


def read_summary(files: list[Path], rules: Rules, cache: Path | None, *, quiet: bool) -> Summary:
    """Read traces, with a progress bar if there are several."""
    from shardwise.observe.summary import summarise

    if quiet or len(files) < 4:
        return summarise(files, rules, cache=cache)
    from rich.progress import Progress

    from shardwise.report.screen import plain_console

    with Progress(console=plain_console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading traces", total=len(files))
        return summarise(
            files, rules, cache=cache, progress=lambda done: bar.update(task, completed=done)
        )


def summary_json(summary: Summary, verdicts: list[Verdict], health: Health) -> dict[str, Any]:
    """The analysis as JSON.

    Times, calls and bytes of ranks and verdicts are per step, averaged over the profiled steps;
    `full_trace`, `steps` and `matched` say what they cover.
    """
    joined = summary.joined
    return {
        "schema": 2,
        "kind": "measured",
        "step_ns": health.step_ns,
        "profiled_steps": health.steps,
        "healthy": health.healthy,
        "verdicts": [verdict.to_dict(health) for verdict in verdicts],
        "ranks": [_rank_json(rank) for rank in summary.ranks],
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


def _rank_json(rank: RankSummary) -> dict[str, Any]:
    def per_step(values: dict[str, Any]) -> dict[str, Any]:
        """Averages of what is summed over the profiled steps; sizes of groups are not."""
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


def trace_files(given: list[Path]) -> list[Path]:
    """Files as given; for a folder its traces, for a run folder those of its last profile."""
    from shardwise.observe.run_folder import TRACES, profiled_windows, traces_in
    from shardwise.spec.record import SpecError

    files: list[Path] = []
    problems: list[str] = []
    for path in given:
        if not path.exists():
            problems.append(f"trace: {path} does not exist; give a trace file or a folder")
        if not path.is_dir():
            files.append(path)
            continue
        windows = profiled_windows(path / TRACES)
        if not windows and (path / "run.toml").is_file():
            problems.append(
                f"trace: the run in {path} was not profiled; run 'shardwise profile', or add "
                "[train.profile] to its run.toml"
            )
            continue
        inside = traces_in(windows[-1] if windows else path)
        if not inside:
            problems.append(
                f"trace: {path} has no .json or .json.gz files; write traces with torch.profiler's "
                "export_chrome_trace"
            )
        files += inside
    if problems:
        raise SpecError(problems)
    return files
