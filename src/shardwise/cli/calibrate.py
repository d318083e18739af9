"""`shardwise calibrate`: measure this machine, or fit its parameters to runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, check_output, print_json
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.spec.cluster import ClusterSpec, DeviceSpec
    from shardwise.trials.calibrate.fit import Fit
    from shardwise.trials.calibrate.machine.measure import Machine
    from shardwise.trials.calibrate.machine.quality import Doubt


_FromRun = Annotated[
    list[Path] | None,
    typer.Option(
        "--from-run",
        help="Run folder on this cluster, to fit instead of measuring; repeat for several "
        "different runs.",
        show_default=False,
    ),
]
_Output = Annotated[Path, typer.Option("--output", "-o", help="TOML file to write the cluster to.")]
_Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Processes on this machine; default: all GPUs, or two CPU processes.",
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(help="Device of the catalogue, to state rates as shares of its peak."),
]
_Network = Annotated[
    str | None,
    typer.Option(help="Nominal network bandwidth per device, such as 400Gbps."),
]
_Force = Annotated[
    bool, typer.Option("--force", help="Write the file even if the measurement is poor.")
]


def calibrate(
    from_run: _FromRun = None,
    output: _Output = Path("cluster.toml"),
    nproc: _Nproc = None,
    device: _Device = None,
    network: _Network = None,
    force: _Force = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, or fit runs on it, and write a cluster file for --cluster.

    Measures matmuls, attention, memory, optimizer and collectives between the processes it
    launches; under torchrun or Slurm between all launched processes. With --from-run, fits
    coefficients to two to six short runs, which is more accurate, most of all with profiled runs.

    Exits with 1, and writes nothing, if the machine was too busy for a good measurement.
    """
    from shardwise.spec.record import SpecError

    check_output(output, ".toml")
    if output.suffix != ".toml":
        raise SpecError(f"--output: must end in .toml; use {output.stem}.toml")
    if from_run:
        if nproc or device or network:
            raise SpecError(
                "--from-run: the runs define the cluster; remove --nproc, --device and --network"
            )
        _calibrate_from_runs(from_run, output, as_json)
    else:
        _calibrate_by_measuring(output, nproc, device, network, as_json, force)


# Measures this machine on all its processes, prints the result and writes `output`. If the
# measurement is poor, it exits with 1 and writes nothing, unless `force`.
def _calibrate_by_measuring(
    output: Path,
    nproc: int | None,
    device: str | None,
    network: str | None,
    as_json: bool,
    force: bool,
) -> None:
    from shardwise.cli.long import needs_torch, prepare_long_run, report_errors_once
    from shardwise.spec.catalogue import find_device
    from shardwise.spec.quantity import QuantityError, parse_rate
    from shardwise.spec.record import SpecError

    spec = find_device(device) if device else None
    try:
        rate = parse_rate(network) if network else None
    except QuantityError as error:
        raise SpecError(f"--network: {error}") from None
    needs_torch()
    prepare_long_run()
    from shardwise.launch import environment
    from shardwise.launch import launcher as launch
    from shardwise.launch.slurm import adopt_slurm

    joined = adopt_slurm(os.environ) or environment.is_worker(os.environ)
    processes = 1 if joined else _processes(nproc)
    _check_device(spec)
    if processes > 1:
        words = ["calibrate", "--output", str(output), *(["--json"] if as_json else [])]
        words += ["--device", device] if device else []
        words += ["--network", network] if network else []
        words += ["--force"] if force else []
        with tempfile.TemporaryDirectory() as folder:
            os.environ[environment.FOLDER] = folder
            raise typer.Exit(launch.launch(words, processes, Path(folder)))
    if joined and environment.FOLDER in os.environ:
        environment.end_with_launcher()
    from shardwise.report.machine import MeasuringScreen, print_doubts, print_machine
    from shardwise.spec.lookup import write_cluster
    from shardwise.trials.calibrate.machine.cluster import to_cluster
    from shardwise.trials.calibrate.machine.measure import measure_machine
    from shardwise.trials.calibrate.machine.quality import find_doubts

    leads = os.environ.get("RANK", "0") == "0"
    with report_errors_once(), MeasuringScreen(quiet=not leads) as screen:
        machine = measure_machine(screen.step)
    if not leads:
        return
    cluster = to_cluster(machine, spec, rate)
    found = list(find_doubts(machine))
    writes = force or not found
    if writes:
        output.write_text(write_cluster(cluster), encoding="utf-8")
    if as_json:
        print_json(_machine_json(cluster, machine, found))
    else:
        print_machine(machine, screen.seconds)
        print_doubts(found, is_written=writes)
        if writes:
            echo(f"\nWritten to {output}. Use it with: --cluster {output}")
    if not writes:
        raise typer.Exit(1)


def _check_device(spec: DeviceSpec | None) -> None:
    """Raise SpecError if the device is a GPU and this machine has none, or the reverse."""
    from shardwise.pytorch.device import accelerator
    from shardwise.spec.record import SpecError

    if spec is not None and spec.is_cpu == (accelerator() is not None):
        here = "GPUs" if spec.is_cpu else "no GPU"
        raise SpecError(f"--device: is {spec.name}, but torch finds {here}; remove --device")


def _processes(nproc: int | None) -> int:
    """The number of processes: `nproc`, all GPUs, or 2. SpecError for more than there are GPUs."""
    from shardwise.pytorch.device import accelerator_count
    from shardwise.spec.record import SpecError

    gpus = accelerator_count()
    if nproc is not None and gpus and nproc > gpus:
        raise SpecError(f"--nproc: {nproc} processes, but this machine has {gpus} GPUs")
    return nproc or gpus or 2


def _machine_json(cluster: ClusterSpec, machine: Machine, found: list[Doubt]) -> dict[str, object]:
    """The measured cluster, all measurements and doubts about them, as a JSON object."""
    from shardwise.report.machine import machine_table

    return {
        "schema": 1,
        "kind": "measured",
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "machine": machine_table(machine),
        "doubts": [doubt._asdict() for doubt in found],
    }


def _calibrate_from_runs(from_run: list[Path], output: Path, as_json: bool) -> None:
    """Fit coefficients to run folders, write the cluster to `output`, and print the fit."""
    from shardwise.observe.observation import read_observation
    from shardwise.report.calibrate import print_fit
    from shardwise.spec.lookup import write_cluster
    from shardwise.trials.calibrate.fit import fit

    observations = [read_observation(folder) for folder in from_run]
    cluster = _shared_cluster([one.run.cluster for one in observations])
    names = ", ".join(folder.name for folder in from_run)
    found = fit(observations, source=f"fitted to {len(from_run)} runs: {names}")
    calibrated = cluster.but(calibration=found.calibration)
    output.write_text(write_cluster(calibrated), encoding="utf-8")
    if as_json:
        print_json(_json(calibrated, found, [str(folder) for folder in from_run]))
    else:
        print_fit(calibrated, observations, found, from_run)
        echo(f"\nWritten to {output}. Use it with: --cluster {output}")


def _shared_cluster(clusters: list[ClusterSpec]) -> ClusterSpec:
    """The cluster that all runs share; SpecError if they differ."""
    from shardwise.spec.record import SpecError

    first = clusters[0]
    for other in clusters[1:]:
        same = (other.device.name, other.nodes, other.devices_per_node, other.network) == (
            first.device.name, first.nodes, first.devices_per_node, first.network
        )  # fmt: skip
        if not same:
            raise SpecError(
                f"--from-run: the runs are on different clusters ({first} and {other}); calibrate "
                "each cluster separately"
            )
    return first


def _json(cluster: ClusterSpec, found: Fit, runs: list[str]) -> dict[str, object]:
    """The fitted cluster and the relative error of each run, as a JSON object."""
    return {
        "schema": 1,
        "kind": "measured",
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "errors": dict(zip(runs, found.errors, strict=True)),
    }
