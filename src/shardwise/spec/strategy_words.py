"""Text for a strategy: its layout, a full configuration, a run, and table cells.

Sentences name a layout ("ZeRO-3 in groups of 8"); tables show the shorthand that `--strategy` reads
("zero3:8").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from shardwise.spec.catalogue import figure
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.spec.fused_loss import LOSS_KERNELS, PACKAGES
from shardwise.spec.job import Job
from shardwise.spec.mesh import Mesh
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import LOW_BIT, Optimizer
from shardwise.spec.recompute import show_recompute, show_recomputed_share
from shardwise.spec.run import RunSpec
from shardwise.spec.states import offload_words
from shardwise.spec.strategy import Kind, Strategy

KIND_NAMES: dict[Kind, str] = {
    "single": "single device",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
_GRADIENT_SYNC = {
    "every": "gradients reduced every micro-batch",
    "local": "gradients reduced across groups in the last micro-batch",
    "last": "gradients reduced in the last micro-batch",
}


class HasLayout(Protocol):
    """A strategy, or a layout alone."""

    @property
    def kind(self) -> Kind: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def expert(self) -> int: ...


def layout_words(layout: HasLayout) -> str:
    """The layout as words for a sentence: "DDP", "ZeRO-3 in groups of 8", "ZeRO-3 × expert 8"."""
    experts = f" × expert {layout.expert}" if layout.expert > 1 else ""
    return KIND_NAMES[layout.kind] + mesh_words(layout.mesh) + experts


def mesh_words(mesh: Mesh) -> str:
    """Groups and inner degrees as words: " in groups of 8 × tensor 2"; empty without any."""
    groups = ""
    if mesh.states > 1 and mesh.replicate > 1:
        # If only context groups share a copy, their size is the context degree, named later.
        groups = f" in groups of {mesh.shard}" if mesh.shard > 1 else " within context groups"
    return groups + mesh.in_words


def shorthand(strategy: Strategy) -> str:
    """The layout as `--strategy` reads it and tables show it: "ddp", "zero3", "zero3:8"."""
    return strategy.shorthand


def configuration_words(
    strategy: Strategy, *, seq_len: int | None = None, blocks: int | None = None
) -> str:
    """The settings of a configuration in one line, without defaults.

    `seq_len` adds the tokens of a micro-batch. `blocks` is the model's number of blocks; with it,
    partial recomputation is a count of blocks.
    """
    return _join_words(
        layout_words(strategy),
        _micro_batch(strategy, seq_len),
        _accumulation(strategy),
        _recompute(strategy, blocks),
        _loss(strategy),
        _inner_axes_words(strategy),
        _reshard(strategy),
        *_prefetch(strategy),
        _blocks_per_unit(strategy),
        _gradient_sync(strategy),
        f"gradients reduced in {strategy.reduce_dtype}" if strategy.reduce_dtype != "fp32" else "",
        _compression(strategy),
        _low_bits(strategy),
        offload_words(strategy.offload),
    )


def _compression(strategy: Strategy) -> str:
    if strategy.compress == "powersgd":
        return f"gradients compressed by PowerSGD of rank {strategy.powersgd_rank}"
    return f"gradients averaged in {strategy.compress}" if strategy.compress else ""


def _low_bits(strategy: Strategy) -> str:
    if strategy.linear_dtype is None:
        return ""
    gathered = " and gathers" if strategy.low_bit_gather else ""
    return f"products{gathered} in {strategy.linear_dtype}"


def unusual_settings(strategy: Strategy) -> list[str]:
    """Words for settings that are not usual, except batch and recomputation; may be empty."""
    settings = (
        _reshard(strategy),
        *_prefetch(strategy),
        _blocks_per_unit(strategy),
        _gradient_sync(strategy),
        _loss(strategy),
    )
    return [setting for setting in settings if setting]


def run_words(run: RunSpec) -> str:
    """The strategy and job of a run in one line, without model and cluster."""
    strategy, job = run.strategy, run.job
    own, master = strategy.param_dtype, strategy.master_dtype
    stochastic = " with stochastic rounding" if strategy.states else ""
    return _join_words(
        layout_words(strategy),
        _micro_batch(strategy, job.seq_len),
        _accumulation(strategy),
        _recompute(strategy, blocks_of(run.model)),
        (own if own == master else f"{own} over {master}") + stochastic,
        _low_bits(strategy),
        job.optimizer,
        _method(job),
        _loss(strategy),
        f"{strategy.attention} attention" if strategy.attention else "",
        _dispatch(strategy),
        _inner_axes_words(strategy),
        "embedding and head in their own units" if strategy.split_root else "",
        _blocks_per_unit(strategy),
        *_prefetch(strategy),
        _reshard(strategy),
        _gradient_sync(strategy),
        _compression(strategy),
        "torch.compile" if strategy.compile else "",
        offload_words(strategy.offload),
    )


def _method(job: Job) -> str:
    """The training method, with whether a reference model runs; empty for a language model."""
    if job.method is None:
        return ""
    reference = "with a reference model" if job.has_reference else "without a reference model"
    return f"{job.method.upper()} {reference}"


def method_words(job: Job, strategy: Strategy) -> str:
    """A sentence on what a training method adds to a step; empty for a language model."""
    if job.method == "dpo":
        frozen = (
            ", and the forward of a frozen reference model is part of the step"
            if job.has_reference
            else ", without a reference model in the step"
        )
        pairs = strategy.micro_batch // 2
        return (
            f"DPO: a micro-batch of {strategy.micro_batch} sequences is {pairs} "
            f"pair{'s' * (pairs != 1)}{frozen}. No DPO run was fitted."
        )
    if job.method == "grpo":
        return (
            "GRPO: this is the step of the trainer; generating and scoring answers takes time that "
            "is not in it, and memory only as generation_memory says. No GRPO run was fitted."
        )
    return ""


def compile_words(strategy: Strategy, model: object, cluster: ClusterSpec) -> str:
    """A sentence on the evidence for predictions with torch.compile; empty without it."""
    if not strategy.compile:
        return ""
    if not isinstance(model, ModelSpec):
        return "torch.compile: not predicted for traced models; times and memory are uncompiled."
    if cluster.calibration is not None:
        return "torch.compile: its effect on time is that of the calibrated runs."
    runs = round(figure("compiled_runs"))
    return f"torch.compile: its effect on time is fitted on {runs} published runs."


def package_words(strategy: Strategy) -> str:
    """A sentence on the package that a fused loss needs; empty without one."""
    if strategy.loss != "fused":
        return ""
    filtered = " It leaves out gradients that are too small to count."
    return (
        f"loss = fused needs {PACKAGES[strategy.loss_kernel][0]}; planned as the package computes "
        f"it, not run here.{filtered if strategy.loss_kernel == 'cut_cross_entropy' else ''}"
    )


def arithmetic_words(strategy: Strategy, optimizer: Optimizer) -> Iterator[str]:
    """Sentences on settings that change the arithmetic compared with fp32 parameters and states."""
    yield from _states_words(strategy)
    yield from _compression_words(strategy)
    if strategy.linear_dtype is not None:
        yield (
            f"Products of linear layers in {strategy.linear_dtype} change the arithmetic; planned "
            f"from kernels and {round(figure('low_bit_runs'))} fitted runs, not trained here."
            + ("" if strategy.compile else " Those runs compiled or fused casts; eager gains less.")
        )
    if optimizer in LOW_BIT:
        yield (
            f"{optimizer} changes the arithmetic: states are rounded to {LOW_BIT[optimizer].bits} "
            f"bits in blocks of {LOW_BIT[optimizer].block}."
        )


def _compression_words(strategy: Strategy) -> Iterator[str]:
    """A sentence on how gradients are compressed before they are averaged; none if not."""
    compress = strategy.compress
    if compress == "powersgd":
        yield (
            f"compress = powersgd changes the arithmetic: after {strategy.powersgd_start:,} steps, "
            f"gradients of large matrices are averaged as matrices of rank "
            f"{strategy.powersgd_rank}, and what that leaves out is added to the next step. "
            "Predicted are the steps after that; no such run was fitted."
        )
    elif compress is not None:
        overflow = ", which ends at 65,504," if compress == "fp16" else ""
        yield (
            f"compress = {compress} changes the arithmetic: gradients are rounded to {compress}"
            f"{overflow} before they are averaged, and summed in {compress}."
        )


def _states_words(strategy: Strategy) -> Iterator[str]:
    """Sentences on model states of less than 32 bits; none for fp32."""
    master = strategy.master_dtype
    if strategy.offloads("optimizer") and strategy.kept_dtype != master:
        yield (
            f"The offloaded optimizer changes the arithmetic: gradients are kept in "
            f"{strategy.kept_dtype} until the update, which is in {master} on the host."
        )
    if strategy.states is not None:
        yield (
            f"States in {master} change the arithmetic: parameters, gradients and moments are "
            "rounded; updates are rounded at random, so that small ones count on average."
        )
    elif master == "bf16":
        yield (
            "States in bf16 change the arithmetic: parameters, gradients and moments are rounded, "
            "and an update below 1/512 to 1/256 of its weight is lost. --states bf16+stochastic "
            "keeps it on average."
        )
    elif DTYPE_BYTES[master] < 4:
        yield (
            f"Master weights in {master} change the arithmetic: updates are rounded to {master}, "
            "and small ones are lost."
        )


def blocks_of(model: object) -> int | None:
    """A model's number of blocks; None for a traced model."""
    return model.layers if isinstance(model, ModelSpec) else None


def batch_words(strategy: Strategy) -> str:
    """Micro-batch and accumulation steps for a table cell: "2 × 16", or "2" for one step."""
    steps = f" × {strategy.accumulate}" if strategy.accumulate > 1 else ""
    return f"{strategy.micro_batch}{steps}"


def recompute_cell(strategy: Strategy, blocks: int | None = None) -> str:
    """The recompute policy for a table cell: "none", "full", "28 of 32"."""
    recompute = strategy.recompute
    return recompute if isinstance(recompute, str) else show_recomputed_share(recompute, blocks)


def _join_words(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _micro_batch(strategy: Strategy, seq_len: int | None) -> str:
    tokens = f" × {seq_len:,} tokens" if seq_len else ""
    return f"micro-batch {strategy.micro_batch}{tokens}"


def _accumulation(strategy: Strategy) -> str:
    if strategy.shares is not None:
        counts = " and ".join(str(share.accumulate) for share in strategy.shares)
        return f"{counts} accumulation steps by part"
    return f"{strategy.accumulate} accumulation steps" if strategy.accumulate > 1 else ""


def _recompute(strategy: Strategy, blocks: int | None) -> str:
    if strategy.recompute == "none":
        return "no recompute"
    if isinstance(strategy.recompute, str):
        return f"{strategy.recompute} recompute"
    return f"recompute {show_recompute(strategy.recompute, blocks)}"


def _loss(strategy: Strategy) -> str:
    if strategy.loss == "fused":
        return f"fused loss ({LOSS_KERNELS[strategy.loss_kernel]})"
    return f"loss in {strategy.loss_chunks} chunks" if strategy.loss == "chunked" else ""


def _inner_axes_words(strategy: Strategy) -> str:
    """Words for unusual forms of tensor and context parallelism; empty if usual."""
    return _join_words(
        "no sequence parallelism" if strategy.tensor > 1 and not strategy.sequence_parallel else "",
        "tensor groups across nodes" if strategy.tensor_across_nodes else "",
        "ring attention" if strategy.context > 1 and strategy.context_method == "ring" else "",
    )


def _dispatch(strategy: Strategy) -> str:
    """Words for how tokens travel to their experts, if the strategy says it."""
    named = {"all-to-all": "torch's all-to-all", "deepep": "DeepEP", "hybridep": "HybridEP"}
    if strategy.dispatch is None or strategy.expert == 1:
        return ""
    return f"tokens sent by {named[strategy.dispatch]}"


def _blocks_per_unit(strategy: Strategy) -> str:
    return f"{strategy.blocks_per_unit} blocks per unit" if strategy.blocks_per_unit > 1 else ""


def _prefetch(strategy: Strategy) -> Iterator[str]:
    """Words for prefetch in the backward and in the forward, if not usual."""
    if strategy.sharded and strategy.prefetch != 1:
        yield f"prefetch {strategy.prefetch}"
    if strategy.sharded and strategy.forward_prefetch:
        yield f"forward prefetch {strategy.forward_prefetch}"


def _reshard(strategy: Strategy) -> str:
    group = strategy.reshard_after_forward
    return f"reshard after forward in groups of {group}" if type(group) is int else ""


def _gradient_sync(strategy: Strategy) -> str:
    """Words for when gradients are reduced; empty if usual for the kind."""
    usual = "last" if strategy.kind == "zero1" else "local" if strategy.hybrid else "every"
    told = strategy.sharded and strategy.accumulate > 1 and strategy.grad_sync not in (None, usual)
    return _GRADIENT_SYNC[strategy.grad_sync or "every"] if told else ""
