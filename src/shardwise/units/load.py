"""Load the units of any model. The only place where planning imports torch, on demand."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from shardwise.spec.catalogue import traced
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dispatch import ALL_TO_ALL
from shardwise.spec.huggingface import config_table, without_formulas
from shardwise.spec.job import Job
from shardwise.spec.lookup import ConfigRef, Model, ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.progress import progress_line
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.dispatch import copies_among, dispatch_of, sent_by_library
from shardwise.units.division import Division
from shardwise.units.expert import divide_experts
from shardwise.units.kept_trace import kept_lengths, kept_units
from shardwise.units.low_bits import in_low_bits
from shardwise.units.unit import ModelUnits, Unit


def load_units(model: Model, seq_len: int, strategy: Strategy, routing: float = 1.0) -> ModelUnits:
    """The units of a model at a sequence length, with a strategy's dtypes and parallelism.

    `routing` is the tokens of the device of an expert group that gets the most, over the mean.
    """
    adapter = model.adapter
    if adapter is not None and adapter.base == "fp8" and strategy.linear_dtype != "fp8":
        raise SpecError(
            "adapter.base: weights in fp8 are multiplied as they are stored; set "
            'strategy.linear_dtype = "fp8" (--precision fp8), or base = "bf16"'
        )
    division = Division.of(strategy, routing)
    units = _loaded(model, seq_len, strategy, division)
    if units.division != division:
        units = divide_experts(units, division)
    units = _with_attention(units, strategy)
    if strategy.linear_dtype is None:
        return units
    return in_low_bits(units, strategy.linear_dtype, gathered=strategy.low_bit_gather)


def job_units(model: Model, job: Job, strategy: Strategy, cluster: ClusterSpec) -> ModelUnits:
    """The units of a model for a job: with its reference model and the memory it reserves.

    Tokens travel to their experts as the software of the cluster sends them.
    """
    units = load_units(model, job.seq_len, strategy, job.routing)
    if strategy.expert > 1 and dispatch_of(strategy, cluster) != ALL_TO_ALL:
        undivided = load_units(model, job.seq_len, strategy.but(expert=1))
        copies = copies_among(strategy.expert, cluster.devices_per_node)
        units = sent_by_library(units, undivided, copies)
    if job.method is None:
        return units
    # With adapters the reference is the model itself, without them.
    shared = model.adapter is not None and model.adapter.rank is not None
    kind: Literal["copy", "shared"] = "shared" if shared else "copy"
    reserved = float(job.generation_memory or 0)
    reference = kind if job.has_reference else None
    return replace(units, reference=reference, reserved_bytes=reserved)


def _with_attention(units: ModelUnits, strategy: Strategy) -> ModelUnits:
    """The units with the attention kernel of a strategy; unchanged if it names none."""
    if strategy.attention is None:
        return units

    def named(block: Unit) -> Unit:
        members = tuple(map(named, block.members))
        stage = block.stage.changed(attention=strategy.attention)
        return replace(block, stage=stage, members=members)

    made = {block: named(block) for block in dict.fromkeys(units.blocks)}
    return replace(units, blocks=tuple(made[block] for block in units.blocks))


def _loaded(model: Model, seq_len: int, strategy: Strategy, division: Division) -> ModelUnits:
    """The units by formulas for a ModelSpec, else by tracing the module, experts undivided.

    Formulas do not know the names of all parameters, so a ModelSpec whose adapter trains named
    parameters in full is traced too.
    """
    dtype, autocast = strategy.param_dtype, strategy.autocast
    by_formulas = model.adapter is None or not model.adapter.train
    if isinstance(model, ModelSpec) and by_formulas:
        eager = strategy.attention == "eager"
        return decoder_units(model, seq_len, dtype, strategy.compile, autocast, division, eager)
    if strategy.attention == "eager":
        raise SpecError(
            f"strategy.attention: {model.name} is traced, with fused attention; eager attention is "
            "planned for models with formulas only"
        )
    if strategy.mesh.inner > 1:
        raise SpecError(
            f"strategy: {model.name} is traced, and a trace knows neither tensor nor context "
            "parallelism; leave both at 1"
        )
    if isinstance(model, ConfigRef) and model.adapter is None:
        kept = _kept(model, seq_len, dtype, autocast)
        if kept is not None:
            return kept
    problem = _why_not_traceable(model)
    if problem:
        raise SpecError(problem)
    source = model.factory if isinstance(model, ModuleRef) else model.name
    from shardwise.units.module import traced_units

    with progress_line(f"Tracing {source} on the meta device …"):
        return traced_units(model, seq_len, dtype, autocast, casts=strategy.sharded)


def _kept(model: ConfigRef, seq_len: int, dtype: str, autocast: bool) -> ModelUnits | None:
    """The units of a kept trace that computes the same; None without one."""
    name = traced.matching(config_table(Path(model.config)))
    if name is None:
        return None
    units = kept_units(name, seq_len, f"{dtype}+autocast" if autocast else dtype)
    return units and replace(units, name=model.name)


def _why_not_traceable(model: Model) -> str:
    """Why a model cannot be traced, in a sentence; empty if it can."""
    if find_spec("torch") is not None:
        return ""
    if isinstance(model, (ModuleRef, ModelSpec)):
        return f'model: tracing {model.name} needs torch: pip install "shardwise[train]"'
    config = config_table(Path(model.config))
    kept = traced.matching(config)
    if kept is None:
        return without_formulas(config)
    shortest, longest = kept_lengths(kept)
    return (
        f"model: the kept trace of {kept} is of full training with bf16 compute and {shortest:,} "
        f"to {longest:,} tokens; adapters, other dtypes and other lengths are traced with torch: "
        'pip install "shardwise[hf]"'
    )
