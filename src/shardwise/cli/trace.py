"""`shardwise trace`: why a profiled run is slow, and where its time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.observe.analysis import Trace
    from shardwise.observe.rules import Rules
    from shardwise.spec.cluster import ClusterSpec


_Files = Annotated[
    list[Path],
    typer.Argument(help="Traces of torch.profiler, one per rank, or a folder of them."),
]
_Cluster = Annotated[
    str | None,
    typer.Option(help="Cluster of the run (4x8xH100-SXM@400Gbps), to compare with its peaks."),
]
_Rules = Annotated[
    Path | None,
    typer.Option(help="TOML file with kernel name patterns and thresholds."),
]
_Run = Annotated[
    Path | None,
    typer.Option(help="run.toml of the traced run, to compare simulated and measured."),
]
_Timeline = Annotated[
    Path | None,
    typer.Option(help="With --run: write both steps for Perfetto (.json or .json.gz)."),
]
_Cache = Annotated[Path | None, typer.Option(help="Folder to cache parsed traces in, as Parquet.")]
_Against = Annotated[
    Path | None,
    typer.Option(
        help="An earlier trace or run folder: show what changed instead; exit 1 if a step "
        "takes longer beyond noise. Of folders, the first rank is compared."
    ),
]
_Top = Annotated[
    int, typer.Option(help="With --against: number of changes to show.", min=1, max=500)
]


def trace(
    files: _Files,
    cluster: _Cluster = None,
    rules: _Rules = None,
    run: _Run = None,
    timeline: _Timeline = None,
    cache: _Cache = None,
    against: _Against = None,
    top: _Top = 15,
    as_json: JsonOption = False,
) -> None:
    """Analyse profiler traces: main cause of lost time, evidence, suggested fix.

    Give the traces of all ranks: only then can waiting be separated from transfer.

    Exits with 1 if a step takes longer than that of --against, beyond noise.
    """
    if against is not None:
        from shardwise.cli.diff import compare_traces
        from shardwise.spec.record import SpecError

        if len(files) != 1:
            raise SpecError("--against: compares one trace or run folder; give one")
        compare_traces(against, files[0], top, as_json=as_json)
        return
    from shardwise.cli.run_prediction import RunPrediction
    from shardwise.observe.rules import Rules, read_rules
    from shardwise.observe.run_folder import trace_files
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
    found = read_with_progress(paths, chosen, known, cache, quiet=as_json)
    first = found.summary.ranks[0]
    if as_json:
        print_json(found.to_dict() | (prediction.to_dict(first) if prediction else {}))
    else:
        print_trace(found)
        if prediction is not None:
            prediction.show(first)
    if prediction is not None and timeline is not None:
        prediction.write(first, chosen, timeline)


def read_with_progress(
    files: list[Path],
    rules: Rules,
    cluster: ClusterSpec | None,
    cache: Path | None = None,
    *,
    quiet: bool,
) -> Trace:
    """Read traces, with a progress bar on stderr for four or more, unless `quiet`."""
    from shardwise.observe.analysis import read_traces

    if quiet or len(files) < 4:
        return read_traces(files, rules, cluster, cache=cache)
    from rich.progress import Progress

    from shardwise.report.screen import plain_console

    with Progress(console=plain_console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading traces", total=len(files))

        def show(done: int) -> None:
            bar.update(task, completed=done)

        return read_traces(files, rules, cluster, cache=cache, progress=show)
