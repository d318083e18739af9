"""How a run in Megatron-Bridge differs from Shardwise."""

from __future__ import annotations

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.write.differences import Rule

RULES = (
    Rule(("kind",), "Megatron's FSDP keeps parameters whole: it runs {kind}"),
    Rule(
        ("shard", "replicate"),
        "the file shards over all {shard} devices that see different data; Megatron's groups are "
        "num_distributed_optimizer_instances",
    ),
    Rule(
        ("reshard_after_forward",),
        "the backward gathers parameters from all devices that share them",
    ),
    Rule(
        ("grad_sync", "reshard_after_backward"),
        "Megatron's FSDP reduces gradients in every micro-batch, its distributed optimizer and DDP "
        "in the last one",
    ),
    Rule(("forward_prefetch",), "Megatron decides what it gathers ahead, by size"),
    Rule(("blocks_per_unit",), "every layer is one FSDP unit"),
    Rule(("split_root",), "embedding and head are no units of their own"),
    Rule(("offload",), "the file keeps states on the device; see optimizer_cpu_offload"),
    Rule(
        ("recompute",),
        "the file recomputes nothing; Megatron's selective recomputation is of attention, which "
        "fused kernels do anyway",
    ),
    Rule(("param_dtype", "master_dtype"), "Megatron uses {param_dtype} over fp32 master weights"),
    Rule(("reduce_dtype",), "gradients are reduced in {reduce_dtype}"),
    Rule(("compile",), "Megatron's layers are fused by Transformer Engine, not compiled"),
    Rule(("ddp_bucket_mib",), "Megatron's buckets count parameters: ddp.bucket_size"),
)


def other_differences(run: RunSpec, applied: Strategy, save_every: int) -> list[Difference]:
    """Differences that are not about a field of the strategy.

    `save_every` is the number of steps between saves if the run counts minutes.
    """
    strategy, train, data = run.strategy, run.train or TrainSettings(), run.data or DataSettings()
    differences = Differences(_of_tensor(run))
    if applied.kind in ("zero1", "zero2"):
        differences.add(
            "Megatron keeps all of them on every device between steps and gathers them after the "
            "optimizer step instead of in the forward",
            about="Parameters",
        )
    if strategy.kind == "zero1":
        differences.add(
            "Megatron's distributed optimizer adds them up in fp32 buffers that hold all of them "
            "on every device",
            about="Gradients",
        )
    if run.job.optimizer != "adamw":
        differences.add(
            "the file names Megatron's adam, which is AdamW and keeps two states per parameter",
            {"job.optimizer": run.job.optimizer},
        )
    where = ", ".join(data.path) or data.source
    if where:
        differences.add(
            "the file trains on made-up tokens; write the prefixes of Megatron's .bin and .idx "
            "files into blend",
            {"data": where[:200]},
        )
    save = train.checkpoint
    if save.save and save.every is None:
        why = f"Megatron-Bridge saves every {save_every} steps"
        differences.add(why, {"train.checkpoint.minutes": save.minutes})
    if train.non_finite == "skip":
        differences.add(
            "Megatron stops at a gradient that is not finite", {"train.non_finite": "skip"}
        )
    return differences


def _of_tensor(run: RunSpec) -> list[Difference]:
    """Differences with tensor parallelism; empty without it."""
    strategy = run.strategy
    if strategy.tensor == 1:
        return []
    padded = 128 * strategy.tensor
    pads = (
        f"Megatron pads embedding and head to a multiple of {padded:,} (128 for each device of a "
        "tensor group)"
    )
    overlaps = (
        "Megatron keeps the divided input of a matrix and gathers it again in the backward: less "
        "memory than Shardwise, two all-gathers more per block"
        if strategy.sequence_parallel
        else "Megatron all-reduces gradients of activations while it computes those of weights; "
        "Shardwise waits for them"
    )
    return [
        Difference(pads, about="Vocabulary"),
        Difference(overlaps, about="Tensor parallelism"),
    ]
