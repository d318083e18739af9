"""The screen of `shardwise estimate`: whether it fits, memory by term, collectives, step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.report.adapter import profile_adapter_words
from shardwise.report.bars import print_memory, print_step
from shardwise.report.estimate_words import (
    NOTHING_FITS,
    changes_title,
    fitting_change_words,
    not_compared,
)
from shardwise.report.kernel_words import kernel_words
from shardwise.report.parts import parts_table
from shardwise.report.screen import option, paragraph, plain_table, screen
from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.spec.lookup import Model
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import LOW_BIT
from shardwise.spec.quantity import GIB, show_count, show_gb, show_seconds
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.strategy_words import (
    arithmetic_words,
    compile_words,
    method_words,
    package_words,
    run_words,
)
from shardwise.step.memory_words import AT_RISK, shortfall_words, show_memory
from shardwise.step.profile import StepProfile, ThroughputProfile, TimeProfile
from shardwise.step.words import COLOURS, TERMS, VERDICTS, collective_names

if TYPE_CHECKING:
    from shardwise.planning.ways import Change


def _print_run(out: Console, run: RunSpec, profile: StepProfile) -> None:
    """Print what is estimated: model, cluster and configuration, with notes on its arithmetic."""
    out.print(
        Text(f"{profile.model['name']}", style="bold")
        + Text(f" ({show_count(profile.model['parameters'])} parameters) on {run.cluster}")
        + Text(f", {profile.provenance.kind}")
    )
    out.print(run_words(run), style="dim")
    if run.adapter is not None:
        out.print(profile_adapter_words(run.model, profile))
        _print_unquantised(out, run.model)
    device, dtype = run.cluster.device, run.strategy.param_dtype
    if device.peak and device.peak_flops(dtype) is None:
        out.print(f"Note: {device.name} has no fast {dtype}. Try --precision fp16 or fp32.")
    for note in (
        method_words(run.job, run.strategy),
        *arithmetic_words(run.strategy, run.job.optimizer),
        package_words(run.strategy),
    ):
        if note:
            out.print(note)


def print_estimate(run: RunSpec, profile: StepProfile, ways: Sequence[Change]) -> None:
    """Print the prediction for one configuration, in at most 80 columns.

    `ways` are changes that would make it fit. They are printed unless the verdict is "fits".
    """
    out = screen()
    strategy, memory = run.strategy, profile.known_memory
    _print_run(out, run, profile)
    out.print()
    out.print(_headline(profile))
    if memory.verdict == "does not fit":
        for sentence in _shortfall(profile, strategy):
            out.print(sentence)
    _print_bars(out, run, profile)
    out.print()
    out.print(_memory_table(profile, run))
    wasted = padding_share(profile)
    if wasted > 0.02:
        out.print(
            f"\nPadding: {wasted:.0%} of the sharded memory is empty, because some tensors have "
            f"fewer rows than the {strategy.shard} devices of a shard group. Smaller groups pad "
            "less."
        )
    if memory.host_bytes:
        out.print(f"Offloaded: {show_memory(memory.host_bytes)} of host memory per device.")
    out.print()
    out.print(_traffic_table(profile) if profile.traffic else "No collectives.")
    if profile.work:
        out.print()
        out.print(_work(profile))
        if profile.time is None:
            out.print(_unknown_time(run))
        compiled = compile_words(strategy, run.model, run.cluster)
        if compiled:
            out.print(compiled)
    if profile.parts is not None:
        out.print()
        out.print(parts_table(profile.parts))
    elif memory.verdict != "fits":
        out.print()
        print_ways(out, ways)


def _print_unquantised(out: Console, model: Model) -> None:
    """Print a warning if the experts of a quantised model stay unquantised."""
    kept = model.unquantised_experts if isinstance(model, ModelSpec) else None
    if kept is None or model.adapter is None:
        return
    from shardwise.planning.reasons.warnings import UnquantizedExperts

    warning = UnquantizedExperts(stored=model.adapter.base, kept_in=kept)
    paragraph(out, warning.words(), COLOURS["fair"])


def _print_bars(out: Console, run: RunSpec, profile: StepProfile) -> None:
    """Print the parts of the step time, if it is known, and the memory of a device."""
    if profile.time is not None and profile.throughput is not None:
        print_step(out, _time(profile.time, profile.throughput), profile.time)
        for note in (kernel_words(run.cluster), not_compared(run.cluster).strip()):
            if note:
                paragraph(out, note)
    print_memory(out, profile.known_memory)


def padding_share(profile: StepProfile) -> float:
    """Share (0 to 1) of the sharded parameter memory that is padding of dimension 0."""
    shard = profile.strategy["shard"]
    held = profile.known_memory.terms["parameters"] * shard
    kept = Strategy.read(profile.strategy).kept_dtype
    real = profile.model["parameters"] * DTYPE_BYTES[kept]
    return 1 - real / held if held else 0.0


def _headline(profile: StepProfile) -> Text:
    """The verdict; unless it is "fits", with needed and usable memory."""
    memory = profile.known_memory
    assert memory.verdict is not None
    assert memory.needed_bytes is not None
    assert memory.usable_bytes is not None
    style = f"bold {COLOURS[VERDICTS[memory.verdict].tone]}"
    if memory.verdict == "fits":
        return Text("Fits.", style=style)
    short = shortfall_words(memory.needed_bytes, memory.usable_bytes)
    head = Text(f"{memory.verdict.capitalize()}:", style=style) + Text(f" {short}.")
    if memory.verdict == "at risk":
        head += Text(f" {AT_RISK}")
    return head


def _shortfall(profile: StepProfile, strategy: Strategy) -> Iterator[str]:
    """Sentences: the largest memory term, and why more sharding or devices may not help."""
    from shardwise.predict.fit import shortfall_of

    short = shortfall_of(profile, strategy)
    size = show_memory(short.largest_bytes)
    yield f"Largest term: {_term(short.largest_term, strategy)} ({size})."
    if short.keeps_all_gathered:
        yield (
            f"{strategy.kind} keeps all parameters gathered during a step; zero3 gathers one unit "
            "at a time."
        )
    if short.unshrinking_bytes is not None:
        yield (
            f"More devices alone do not help: {show_memory(short.unshrinking_bytes)} stay on each "
            "device, however many there are."
        )


def _memory_table(profile: StepProfile, run: RunSpec) -> Table:
    """Table of bytes per device at the peak by term, with shares of the capacity."""
    memory = profile.known_memory
    assert memory.capacity_bytes is not None
    unit, factor = ("GiB", GIB) if memory.peak_allocated_bytes >= GIB else ("MiB", 2**20)
    table = plain_table()
    table.add_column(f"Tensors at the peak ({memory.peak_phase})", no_wrap=True)
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("of the device", justify="right", no_wrap=True)
    for term, size in memory.terms.items():
        # Terms that round to 0.00 are left out; the total below includes them.
        if size / factor >= 0.005:
            share = _share(size / memory.capacity_bytes)
            table.add_row(_label(term, run), f"{size / factor:,.2f}", share)
    peak = memory.peak_allocated_bytes
    table.add_row(
        Text("total", style="bold"),
        Text(f"{peak / factor:,.2f}", style="bold"),
        _share(peak / memory.capacity_bytes),
    )
    return table


def _label(term: str, run: RunSpec) -> str:
    """Name of a memory term with sharding and dtype, such as "parameters (1/8 of all, fp32)"."""
    strategy, optimizer, adapter = run.strategy, run.job.optimizer, run.adapter
    parts = (strategy.mesh.states if strategy.sharded else 1) * strategy.tensor
    share = f"1/{parts} of all, " if parts > 1 else ""
    stored: str = adapter.base if adapter else strategy.kept_dtype
    if adapter is not None and adapter.quantised:
        stored += f" and {adapter.float_dtype}"
    kept = run.model.unquantised_experts if isinstance(run.model, ModelSpec) else None
    experts = f", experts {kept}" if kept else ""
    detail = {
        "parameters": f"{share}{stored}{experts}",
        "gradients": f"{share}{strategy.kept_dtype}",
        "optimizer": f"{share}{optimizer if optimizer in LOW_BIT else strategy.master_dtype}",
        "unsharded_parameters": strategy.param_dtype,
        "reduce_buffers": strategy.reduce_dtype,
    }.get(term)
    name = _term(term, strategy)
    return f"{name} ({detail})" if detail else name


def _term(term: str, strategy: Strategy) -> str:
    """The name of a memory term; without sharding, "unsharded_parameters" are autocast copies."""
    copies = term == "unsharded_parameters" and not strategy.sharded
    return "working copies of parameters" if copies else TERMS[term]


def _share(share: float) -> str:
    """A share as a percentage; from 10 on as a multiple, such as "12x"."""
    return f"{share:.0%}" if share < 9.995 else f"{share:.0f}x"


def _traffic_table(profile: StepProfile) -> Table:
    """Table of collectives per step: calls, bytes of each call, total bytes, bytes sent."""
    table = plain_table()
    table.add_column("Collectives per step", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("sent per device", justify="right", no_wrap=True)
    keys = [(one.op, one.group_size, one.group) for one in profile.traffic]
    names = collective_names(keys)
    for key, collective in zip(keys, profile.traffic, strict=True):
        table.add_row(
            names[key],
            f"{collective.calls:,}",
            show_gb(collective.bytes / collective.calls),
            show_gb(collective.bytes),
            show_gb(collective.sent_bytes),
        )
    return table


def _work(profile: StepProfile) -> str:
    """Lines on tokens and FLOPs of a step per device, and the throughput if it is known."""
    work = profile.work
    assert work is not None
    devices = profile.cluster["devices"]
    again = work.hardware_flops / work.model_flops - 1
    extra = f", {again:.0%} more with recompute" if again > 0.0005 else ""
    told = (
        f"One step: {work.tokens:,} tokens, "
        f"{work.model_flops / devices / 1e12:,.1f} TFLOP per device{extra}."
    )
    rates = profile.throughput
    if rates is None:
        return told
    mfu = f", MFU {rates.mfu:.0%}" if rates.mfu is not None else ""
    return f"{told}\nThroughput: {rates.tokens_per_s:,.0f} tokens/s in all{mfu}."


def _unknown_time(run: RunSpec) -> str:
    """Sentence: why the step time is unknown, and what to do about it."""
    if run.cluster.nodes > 1 and run.cluster.network is None:
        return "Step time: unknown. Add the network to the cluster, such as @400Gbps."
    return f"Step time: unknown. No coefficients are fitted for {run.cluster.device.name}."


def _time(time: TimeProfile, rates: ThroughputProfile) -> str:
    """Sentence: seconds per step with the 90 % interval, and tokens/s per device."""
    low, high = time.step_s_interval or (time.step_s, time.step_s)
    between = f"90% interval {show_seconds(low)} to {show_seconds(high)}"
    return (
        f"Step: {show_seconds(time.step_s)} ({between}), "
        f"{rates.tokens_per_s_per_device:,.0f} tokens/s per device"
    )


def print_ways(out: Console, ways: Sequence[Change], of: str = "", in_stack: bool = False) -> None:
    """Print changes after which the run fits, or that no change of settings helps.

    For `of` and `in_stack` see `changes_title`.
    """
    if not ways:
        out.print(NOTHING_FITS)
        return
    out.print(Text(changes_title(ways, of, in_stack), style="bold"))
    for way in ways:
        option(out, fitting_change_words(way))
