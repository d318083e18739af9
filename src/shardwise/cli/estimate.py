"""`shardwise estimate`: one configuration, term by term."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, print_json
from shardwise.cli.settings import takes
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec


@takes(*("model", "cluster", "strategy", "seq_len", "micro_batch", "accumulate", "shares"),
       *("global_batch", "optimizer", "adapter", "precision", "states", "software"),
       *("measured", "recompute"),
       *("grad_sync", "reshard_after_forward", "blocks_per_unit", "prefetch", "split_root"),
       *("loss", "offload", "offload_optimizer", "offload_activations", "compile"))  # fmt: skip
def estimate(
    run: Annotated[
        Path | None, typer.Argument(help="A run.toml to start from.", show_default=False)
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes",
            help="Show what each number of hosts costs, such as 1:4, with the same global batch.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step for Perfetto: step.json or step.json.gz."),
    ] = None,
    as_json: JsonOption = False,
    measured: Any = (),
    **settings: Any,
) -> None:
    """Memory, traffic and time of one configuration, term by term.

    Exits with 1 if it does not fit.
    """
    from shardwise.planning.api import changes_to_fit_run, corrected_by_measured
    from shardwise.predict.api import estimate_run
    from shardwise.report.estimate import print_estimate
    from shardwise.spec.question import describe_run
    from shardwise.spec.record import SpecError
    from shardwise.spec.unequal import check_equal, is_unequal

    if nnodes is not None and trace is not None:
        raise SpecError("--trace: draws one configuration; leave out --nnodes")

    described = describe_run(run=run, resolved=nnodes is None, **settings)
    if nnodes is not None or measured:
        check_equal(described, "--measured" if measured else "--nnodes")
    if nnodes is not None:
        _show_sizes(described, nnodes, as_json)
        return
    described = corrected_by_measured(described, measured)
    profile = estimate_run(described)
    if trace is not None:
        _write_trace(described, trace)
    if as_json:
        print_json(profile.to_dict())
    else:
        fits = profile.known_memory.verdict == "fits" or is_unequal(described)
        print_estimate(described, profile, [] if fits else changes_to_fit_run(described))
    if not profile.known_memory.fits:
        raise typer.Exit(1)


def _show_sizes(run: RunSpec, nnodes: str, as_json: bool) -> None:
    """Print what each number of hosts in `nnodes` costs, such as "1:4"."""
    from shardwise.launch.environment import host_range
    from shardwise.report.sizes import print_sizes, sizes_record
    from shardwise.trainer.sizes import sizes_of

    sizes = sizes_of(run, run.cluster.devices_per_node, host_range(nnodes))
    if as_json:
        print_json(sizes_record(sizes))
    else:
        print_sizes(run, sizes)


def _write_trace(run: RunSpec, path: Path) -> None:
    """Write the timeline of the simulated step to `path` for Perfetto."""
    from shardwise.predict.api import replay_run
    from shardwise.spec.record import SpecError
    from shardwise.step.chrome import write_chrome

    timeline = replay_run(run)
    if timeline is None:
        raise SpecError("trace: the time of this step is not known, so it cannot be drawn")
    if not path.parent.is_dir():
        raise SpecError(f"trace: there is no folder {path.parent}")
    about = {"kind": "simulated", "model": run.model.name, "cluster": str(run.cluster)}
    write_chrome(path, timeline, about)
    echo(f"The simulated step is in {path}; ui.perfetto.dev opens it.", err=True)
