"""`shardwise tune`: plan, try the best few for real, keep the winner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.cli.train import ProcessesOption, RunFile

if TYPE_CHECKING:
    from shardwise.calibrate.tune import Candidate, Probe
    from shardwise.spec.run import RunSpec


def tune(
    run: RunFile,
    top: Annotated[int, typer.Option(min=1, max=100, help="Probes to make at most.")] = 5,
    strategies: Annotated[
        str, typer.Option(help="Which may win, separated by commas.")
    ] = "ddp,zero2,zero3,hsdp",
    batches: Annotated[
        str, typer.Option(help="Micro-batches that may win, as multiples of the run's.")
    ] = "1,2,4",
    nproc: ProcessesOption = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps of each probe.")] = 12,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a probe may take.")] = 600,
    folder: Annotated[Path, typer.Option(help="Where every probe is kept.")] = Path("runs/tune"),
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the winner, as run.toml.")
    ] = Path("tuned.toml"),
    as_json: JsonOption = False,
) -> None:
    """Probe what is predicted fastest, learn from every probe, and write the winner.

    A probe that breaks or hangs is a result. Exits with 1 if none finished.
    """
    from shardwise.calibrate.fit import needs_scipy
    from shardwise.calibrate.tune import tune as search
    from shardwise.cli.long import needs_torch
    from shardwise.cli.train import as_probe, processes_for
    from shardwise.report.tune import print_tuned
    from shardwise.spec.run import read_run, write_run

    check_output(output, ".toml")
    needs_scipy()
    described = read_run(run)
    needs_torch()
    processes = processes_for(described, nproc)
    from shardwise.train.contest import run_once

    probed = as_probe(described, steps)
    candidates = _candidates(probed, strategies, batches, processes)
    numbers = iter(range(1, top + 1))

    def probe(one: Candidate) -> float | str:
        number = next(numbers)
        if not as_json:
            typer.echo(f"probe {number} of at most {top}: {one.name}", err=True)
        place = folder / f"{number}-{one.name.replace(' ', '-').replace(':', '-')}"
        found = run_once(one.run, processes, place, 0, timeout)
        return found if isinstance(found, str) else float(found["measured"]["time"]["step_s"])

    tuned = search(candidates, probe, top)
    best = tuned.best
    if best is not None:
        winner = described._replace(strategy=best.candidate.run.strategy.unplaced())
        output.write_text(write_run(winner), encoding="utf-8")
    if as_json:
        print_json({"schema": 1, "kind": "measured", "reason": tuned.reason,
                    "best": best.candidate.name if best else None,
                    "probes": [_plain(one) for one in tuned.probes]})  # fmt: skip
    else:
        print_tuned(tuned, len(candidates), output)
    if best is None:
        raise typer.Exit(1)


def _plain(probe: Probe) -> dict[str, Any]:
    found = {"name": probe.candidate.name, "predicted_s": probe.predicted_s}
    if probe.measured_s is None:
        return {**found, "failure": probe.failure}
    return {**found, "measured_s": probe.measured_s, "tokens_per_s": probe.tokens_per_s}


def _candidates(
    described: RunSpec, strategies: str, batches: str, processes: int
) -> list[Candidate]:
    """Every strategy with every batch that can be placed on these processes and fits in memory."""
    from shardwise.api import estimate_run
    from shardwise.calibrate.tune import Candidate
    from shardwise.spec.cluster import ClusterSpec
    from shardwise.spec.record import SpecError

    cluster: ClusterSpec = described.cluster
    if cluster.devices_per_node != processes and cluster.nodes == 1:
        cluster = cluster.but(devices_per_node=processes)
    found: dict[object, Candidate] = {}
    for name in dict.fromkeys(word.strip() for word in strategies.split(",") if word.strip()):
        chosen = described.strategy.as_kind(name)
        for factor in _factors(batches):
            size = chosen.micro_batch * factor
            run = described._replace(cluster=cluster, strategy=chosen.but(micro_batch=size))
            try:
                run = run.resolved()
                fits = estimate_run(run).known_memory.fits
            except SpecError:
                continue  # not on so many processes, or not with this batch
            if fits:
                found.setdefault(run.strategy, Candidate(f"{name} x{size}", run))
    if not found:
        raise SpecError("tune: no configuration fits; add recomputation, or smaller --batches")
    return list(found.values())


def _factors(text: str) -> list[int]:
    from shardwise.spec.record import SpecError

    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SpecError(f"--batches: {text!r} is no list of whole numbers, such as 1,2,4")
    return found
