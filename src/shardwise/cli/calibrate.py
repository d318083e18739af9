"""`shardwise calibrate`: coefficients of a cluster from what was measured on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, check_output, print_json

if TYPE_CHECKING:
    from shardwise.calibrate.fit import Fit
    from shardwise.spec.cluster import ClusterSpec


def calibrate(
    from_run: Annotated[
        list[Path],
        typer.Option(
            "--from-run", help="Folder of a run on this cluster; give several, unlike each other."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the cluster, as TOML.")
    ] = Path("cluster.toml"),
    as_json: JsonOption = False,
) -> None:
    """Fit the coefficients of a cluster to runs on it, and write a cluster every command takes.

    Two to six short runs that differ in strategy and batch are enough; profiled ones tell more.
    """
    from shardwise.calibrate.fit import fit
    from shardwise.calibrate.runs import read_observation
    from shardwise.report.calibrate import print_fit
    from shardwise.spec.lookup import write_cluster

    check_output(output, ".toml")
    observations = [read_observation(folder) for folder in from_run]
    cluster = _one_cluster([one.run.cluster for one in observations])
    names = ", ".join(folder.name for folder in from_run)
    found = fit(observations, source=f"fitted to {len(from_run)} runs: {names}")
    calibrated = cluster.but(calibration=found.calibration)
    output.write_text(write_cluster(calibrated), encoding="utf-8")
    if as_json:
        print_json(_json(calibrated, found, [str(folder) for folder in from_run]))
    else:
        print_fit(calibrated, observations, found, from_run)
        typer.echo(f"\nWritten to {output}; give it to any command as --cluster {output}.")


def _one_cluster(clusters: list[ClusterSpec]) -> ClusterSpec:
    """What all runs ran on; refuses to mix."""
    from shardwise.spec.record import SpecError

    first = clusters[0]
    for other in clusters[1:]:
        same = (other.device.name, other.nodes, other.devices_per_node, other.network) == (
            first.device.name, first.nodes, first.devices_per_node, first.network
        )  # fmt: skip
        if not same:
            raise SpecError(
                f"--from-run: runs on {first} and on {other} cannot be mixed; calibrate each apart"
            )
    return first


def _json(cluster: ClusterSpec, found: Fit, runs: list[str]) -> dict[str, object]:
    return {
        "schema": 1,
        "kind": "measured",
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "errors": dict(zip(runs, found.errors, strict=True)),
    }
