"""Write DPO for other stacks, whose batches count pairs, and refuse what a stack does not train."""

from __future__ import annotations

from typing import Any

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import Difference

# Stacks whose file, or whose user's script, trains with DPO.
_WITH_DPO = ("trl", "axolotl", "llama-factory", "accelerate")


def check_method(run: RunSpec, stack: str) -> None:
    """Raise SpecError if the file for a stack cannot train with the run's method."""
    method = run.job.method
    if method == "grpo" and stack != "accelerate":
        raise SpecError(
            f"job.method: no file for {stack} is written for grpo, whose rewards and generation "
            "Shardwise does not describe; export the strategy to accelerate"
        )
    if method is not None and stack not in _WITH_DPO:
        raise SpecError(
            f"job.method: the file for {stack} trains language models only; export {method} to "
            "trl, axolotl or llama-factory"
        )


def in_examples(run: RunSpec, table: dict[str, Any], key: str) -> dict[str, Any]:
    """The table with the micro-batch under `key` in examples: pairs for DPO."""
    return {**table, key: run.strategy.micro_batch // run.job.example} if key in table else table


def reference_difference(run: RunSpec) -> tuple[Difference, ...]:
    """A difference if TRL gathers the whole reference model at once, as it does with FSDP2."""
    units = run.job.method == "dpo" and run.job.has_reference and run.adapter is None
    if not units or not run.strategy.sharded or not run.strategy.reshard_after_forward:
        return ()
    why = (
        "TRL makes one FSDP2 unit of it, which is gathered whole, in a buffer and out of it, while "
        "its forward runs; Shardwise gathers it block by block. Where memory is short, set "
        "precompute_ref_log_probs: true"
    )
    return (Difference(why, about="Reference model"),)
