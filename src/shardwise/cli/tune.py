"""`shardwise tune`: benchmark the most promising configurations and keep the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import ProcessesOption, RunFile
from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.spec.strategy import Strategy
    from shardwise.trials.calibrate.tune import Candidate, Probe, TuneResult


_Top = Annotated[int, typer.Option(min=1, max=100, help="Configurations to benchmark at most.")]
_Strategies = Annotated[str, typer.Option(help="Strategies to consider, separated by commas.")]
_Batches = Annotated[
    str, typer.Option(help="Micro-batches to consider, as multiples of the run.toml's.")
]
_Timeout = Annotated[float, typer.Option(min=1, help="Seconds until a benchmark is killed.")]
_Output = Annotated[
    Path, typer.Option("--output", "-o", help="File for the fastest run, as run.toml.")
]


def tune(
    run: RunFile,
    top: _Top = 5,
    strategies: _Strategies = "ddp,zero2,zero3,hsdp",
    batches: _Batches = "1,2,4",
    nproc: ProcessesOption = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps per benchmark.")] = 12,
    timeout: _Timeout = 600,
    folder: Annotated[Path, typer.Option(help="Folder for all benchmarks.")] = Path("runs/tune"),
    output: _Output = Path("tuned.toml"),
    as_json: JsonOption = False,
) -> None:
    """Benchmark the most promising configurations and keep the fastest.

    Predictions choose what to benchmark next and improve with every measurement. A benchmark that
    fails or hangs excludes its configuration. Exits with 1 if none finished.
    """
    from shardwise.cli.launching import as_short_run, processes_for
    from shardwise.cli.long import needs_torch
    from shardwise.report.tune import print_tuned
    from shardwise.spec.run import read_run, replace_run
    from shardwise.spec.unequal import check_equal
    from shardwise.trials.calibrate.fit import require_scipy
    from shardwise.trials.calibrate.tune import tune as search

    check_output(output, ".toml")
    described = check_equal(read_run(run), "tune", "plan deals micro-batches to unequal parts")
    factors = _factors(batches)
    named = _named_strategies(described, strategies)
    require_scipy()
    needs_torch()
    processes = processes_for(described, nproc)
    from shardwise.trials.compare_strategies import run_once

    probed = as_short_run(described, steps)
    candidates = _candidates(probed, named, factors, processes)
    numbers = iter(range(1, top + 1))

    def probe(one: Candidate) -> float | str:
        number = next(numbers)
        if not as_json:
            echo(f"benchmark {number} of at most {top}: {one.name}", err=True)
        kept = folder / f"{number}-{one.name.replace(' ', '-').replace(':', '-')}"
        found = run_once(one.run, processes, kept, 0, timeout)
        return found if isinstance(found, str) else float(found["measured"]["time"]["step_s"])

    tuned = search(candidates, probe, top)
    if tuned.best is not None:
        winner = tuned.best.candidate.run.strategy
        replace_run(output, described._replace(strategy=winner.unplaced()))
    if as_json:
        print_json(_as_dict(tuned))
    else:
        print_tuned(tuned, len(candidates), output)
    if tuned.best is None:
        raise typer.Exit(1)


def _as_dict(tuned: TuneResult) -> dict[str, Any]:
    """The benchmarks and the fastest of them as a JSON object."""
    return {
        "schema": 1,
        "kind": "measured",
        "stopped": tuned.stopped,
        "best": tuned.best.candidate.name if tuned.best else None,
        "probes": [_probe_json(one) for one in tuned.probes],
    }


def _probe_json(probe: Probe) -> dict[str, Any]:
    """A benchmark as a JSON object: its name, predicted and measured seconds per step."""
    found = {"name": probe.candidate.name, "predicted_s": probe.predicted_s}
    if probe.measured_s is None:
        return {**found, "failure": probe.failure}
    return {**found, "measured_s": probe.measured_s, "tokens_per_s": probe.tokens_per_s}


def _named_strategies(described: RunSpec, strategies: str) -> dict[str, Strategy]:
    """The named strategies by name; all other settings are those of the run.toml."""
    from shardwise.spec.record import Problems, SpecError

    problems, found = Problems(), {}
    for name in [word.strip() for word in strategies.split(",") if word.strip()]:
        with problems.collect():
            found[name] = described.strategy.as_kind(name)
    problems.raise_if_any()
    if not found:
        raise SpecError("strategies: name at least one, such as --strategies zero2,zero3")
    return found


def _candidates(
    described: RunSpec, named: dict[str, Strategy], factors: list[int], processes: int
) -> list[Candidate]:
    """Each strategy with each micro-batch that these processes can run and that fits in memory.

    `factors` are multiples of the run.toml's micro-batch. SpecError if nothing remains.
    """
    from shardwise.predict.api import estimate_run
    from shardwise.spec.cluster import ClusterSpec
    from shardwise.spec.record import SpecError
    from shardwise.trials.calibrate.tune import Candidate

    cluster: ClusterSpec = described.cluster
    if cluster.devices_per_node != processes and cluster.nodes == 1:
        cluster = cluster.but(devices_per_node=processes)
    found: dict[object, Candidate] = {}
    for name, chosen in named.items():
        for factor in factors:
            size = chosen.micro_batch * factor
            run = described._replace(cluster=cluster, strategy=chosen.but(micro_batch=size))
            try:
                run = run.resolved()
                fits = estimate_run(run).known_memory.fits
            except SpecError:
                continue  # these processes or this global batch do not allow it
            if fits:
                found.setdefault(run.strategy, Candidate(f"{name} x{size}", run))
    if not found:
        raise SpecError(
            "tune: no configuration fits in memory; set strategy.recompute or a smaller "
            "strategy.micro_batch in the run.toml"
        )
    return list(found.values())


def _factors(text: str) -> list[int]:
    """Parse a list of positive whole numbers such as "1,2,4"; SpecError for anything else."""
    from shardwise.spec.record import SpecError

    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SpecError(
            f"batches: {text[:60]!r} is not a list of whole numbers from 1 on; write it like 1,2,4"
        )
    return found
