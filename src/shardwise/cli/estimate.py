"""`shardwise estimate`: one configuration, term by term."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import (
    AdapterOption,
    ClusterOption,
    CompileOption,
    GlobalBatchOption,
    LossOption,
    MeasuredOption,
    ModelOption,
    OffloadActivationsOption,
    OffloadOptimizerOption,
    OffloadOption,
    OptimizerOption,
    PrecisionOption,
    SeqLenOption,
    SoftwareOption,
    StatesOption,
)
from shardwise.cli.output import JsonOption, print_json
from shardwise.cli.values import flag_or_size, lowercase, number_or_word
from shardwise.spec.foreign_text import echo
from shardwise.spec.states import offload_of

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec


def estimate(
    run: Annotated[
        Path | None, typer.Argument(help="A run.toml to start from.", show_default=False)
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    strategy: Annotated[
        str | None, typer.Option(help="single, ddp, zero1, zero2, zero3, hsdp, or zero3:8.")
    ] = None,
    seq_len: SeqLenOption = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per device at a time; 1.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Micro-batches per optimizer step; 1.")
    ] = None,
    global_batch: GlobalBatchOption = None,
    precision: PrecisionOption = None,
    states: StatesOption = None,
    software: SoftwareOption = None,
    measured: MeasuredOption = None,
    recompute: Annotated[
        str | None, typer.Option(help="none, selective, full, or a share of blocks such as 0.5.")
    ] = None,
    optimizer: OptimizerOption = None,
    adapter: AdapterOption = None,
    grad_sync: Annotated[
        str | None,
        typer.Option(
            help="When gradients are reduced: every micro-batch, local (in groups at once) or "
            "last; last for ddp and zero1, else every."
        ),
    ] = None,
    reshard_after_forward: Annotated[
        str | None,
        typer.Option(
            help="true (zero3), false (the others), or a group size: gathered from fewer devices."
        ),
    ] = None,
    blocks_per_unit: Annotated[
        int | None, typer.Option(help="Blocks in one fully_shard group; 1.")
    ] = None,
    prefetch: Annotated[
        int | None, typer.Option(help="Units gathered ahead in the backward; 1.")
    ] = None,
    split_root: Annotated[
        bool | None,
        typer.Option("--split-root", help="Embedding and head in fully_shard groups of their own."),
    ] = None,
    loss: LossOption = None,
    offload: OffloadOption = None,
    offload_optimizer: OffloadOptimizerOption = None,
    offload_activations: OffloadActivationsOption = None,
    compile_: CompileOption = None,
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
) -> None:
    """Memory, traffic and time of one configuration, term by term.

    Exits with 1 if it does not fit.
    """
    from shardwise.planning.api import changes_to_fit_run, corrected_by_measured
    from shardwise.predict.api import estimate_run
    from shardwise.report.estimate import print_estimate
    from shardwise.spec.question import describe_run
    from shardwise.spec.record import SpecError

    if nnodes is not None and trace is not None:
        raise SpecError("--trace: draws one configuration; leave out --nnodes")

    described = describe_run(
        model,
        cluster,
        strategy,
        run=run,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=lowercase(optimizer),
        adapter=adapter,
        precision=lowercase(precision),
        states=lowercase(states),
        software=lowercase(software),
        micro_batch=micro_batch,
        accumulate=accumulate,
        recompute=number_or_word(recompute),
        grad_sync=lowercase(grad_sync),
        reshard_after_forward=flag_or_size(reshard_after_forward),
        blocks_per_unit=blocks_per_unit,
        prefetch=prefetch,
        split_root=split_root,
        loss=lowercase(loss),
        offload=offload_of(offload, offload_optimizer, offload_activations),
        compile=compile_,
        resolved=nnodes is None,
    )
    if nnodes is not None:
        _show_sizes(described, nnodes, as_json)
        return
    described = corrected_by_measured(described, measured or ())
    profile = estimate_run(described)
    if trace is not None:
        _write_trace(described, trace)
    if as_json:
        print_json(profile.to_dict())
    else:
        fits = profile.known_memory.verdict == "fits"
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
