"""Write a run as a Lightning script: model and sharding in plain torch, the loop in a Trainer."""

from __future__ import annotations

from shardwise.spec.run import RunSpec, check_loss
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import CheckpointSettings
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.python import in_script, settings_of
from shardwise.stacks.write.python.script import Settings, write_script
from shardwise.stacks.write.python.settings import on_cpu, plain_name, train_of
from shardwise.stacks.write.python.unsupported import unsupported_by_step
from shardwise.stacks.write.torchrun import script_command

NAME = "lightning_run.py"
_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true"}


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The script of a run; it runs FSDP2 through ModelParallelStrategy."""
    check_loss(run)
    command = script_command(run, target.name(NAME))
    about = (
        f"Train {plain_name(run)} with Lightning ({run.strategy}).\n\n    {command}\n\n"
        "Written by `shardwise export`."
    )
    text = write_script(about, "lightning_run", lightning_settings(run))
    differences = tuple(map(Difference, _unsupported(run)))
    return Exported(NAME, text, differences, command, applied(run))


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as Lightning runs it: its DDP reduces in the last micro-batch only."""
    strategy = in_script(run)
    return strategy.but(grad_sync="last") if strategy.kind == "ddp" else strategy


def lightning_settings(run: RunSpec) -> Settings:
    """The constants, choices and imports that a run sets in the Lightning program."""
    run = run._replace(strategy=applied(run))
    settings, strategy, train = settings_of(run), run.strategy, train_of(run)
    choices = {
        # Lightning does the DDP wrapping and the autocast itself.
        "WRAPS_DDP": False,
        "AUTOCAST": False,
        "ACCELERATOR": "cpu" if on_cpu(run) else "gpu",
        "DEVICES": run.cluster.devices_per_node,
        "NODES": run.cluster.nodes,
        "PRECISION": _precision(strategy),
        "DATA_PARALLEL": strategy.data_parallel,
        "TRACKERS": train.trackers,
        "SAVES_BETWEEN": _saves_between(train.checkpoint),
        "SAVE_MINUTES": train.checkpoint.minutes,
        "KEEP": train.checkpoint.keep or -1,
    }
    return settings._replace(choices={**settings.choices, **choices})


def _precision(strategy: Strategy) -> str:
    """The value of `precision` of Lightning's Trainer."""
    if strategy.master_dtype == strategy.param_dtype == "fp64":
        return "64-true"
    # With sharding, fully_shard's mixed-precision policy casts instead.
    return "32-true" if strategy.sharded else _PRECISION[strategy.param_dtype]


def _saves_between(settings: CheckpointSettings) -> bool:
    """Whether checkpoints are saved before the end of the run."""
    return settings.save and bool(settings.every or settings.minutes)


def _unsupported(run: RunSpec) -> tuple[str, ...]:
    """One sentence for each setting that Lightning changes or lacks."""
    strategy, train = run.strategy, train_of(run)
    found = list(unsupported_by_step(run))
    if strategy.kind == "ddp" and strategy.accumulate > 1 and strategy.grad_sync == "every":
        found.append("grad_sync = every: Lightning reduces in the last micro-batch only.")
    if strategy.kind == "ddp" and strategy.param_dtype == "fp16":
        found.append("param_dtype = fp16: Lightning scales the loss and skips steps that overflow.")
    found.append(
        "train.non_finite: Lightning applies gradients that are not finite; it has no guard."
    )
    if train.checkpoint.save:
        found.append(
            "train.checkpoint: Lightning saves in the foreground, without checksums, and not on a "
            "signal; fit(ckpt_path=...) resumes, with the data from the beginning."
        )
        if train.checkpoint.every and train.checkpoint.minutes:
            found.append(
                f"train.checkpoint.minutes: Lightning saves every {train.checkpoint.every} steps "
                "only."
            )
        if train.checkpoint.to is not None:
            found.append("train.checkpoint.to: checkpoints are written to the folder OUTPUT.")
    found.append("train.restart: hanging ranks are not detected and not restarted.")
    return tuple(found)
