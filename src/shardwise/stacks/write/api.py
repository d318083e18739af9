"""Write a run for another stack, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from shardwise.spec.run import RunSpec, read_run
from shardwise.spec.settings import keywords
from shardwise.spec.unequal import check_equal
from shardwise.stacks.write.exported import Exported, Target, TargetSettings
from shardwise.stacks.write.exports import export_run


@keywords(TargetSettings)
def export(run: str | Path | RunSpec, to: str, **target: Unpack[TargetSettings]) -> Exported:
    """Write a run as a file for another stack, with a list of what the stack cannot express.

    Args:
        run: A run.toml or RunSpec.
        to: accelerate, trainer (transformers), trl, axolotl, llama-factory, deepspeed,
            torchtitan, megatron-bridge, lightning, python, slurm or kubernetes.
        **target: `file`, the name of the written file in its start command; of a scheduler also
            `partition`, `account`, `time`, `environment`, `setup`, `spares` and `image`.

    Raises:
        SpecError: The run is invalid, or the stack cannot train it at all.

    Examples:
        >>> written = shardwise.export("run.toml", "accelerate")
        >>> written.text, written.unsupported, written.command
    """
    described = run if isinstance(run, RunSpec) else read_run(Path(run))
    return export_run(
        check_equal(described, "export", "shardwise train runs it as it is").resolved(),
        to,
        Target(**target),
    )
