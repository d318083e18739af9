"""The screen of `shardwise estimate`: does it fit, what the peak is made of, what moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.predict.time import is_fitted
from shardwise.report.screen import COLOURS, bar, plain_table, screen
from shardwise.report.strategy import how
from shardwise.report.words import TERMS, VERDICTS
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.spec.quantity import GIB, show_count, show_gb, show_gib, show_seconds
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.step import StepProfile

if TYPE_CHECKING:
    from shardwise.predict.fit import Change


def print_estimate(run: RunSpec, profile: StepProfile, ways: Sequence[Change]) -> None:
    """Print one predicted configuration for a person, in at most 80 columns.

    `ways` are the changes that would make it fit; they are shown unless it does.
    """
    out = screen()
    strategy, memory = run.strategy, profile.known_memory
    out.print(
        Text(f"{profile.model['name']}", style="bold")
        + Text(f" ({show_count(profile.model['parameters'])} parameters) on {run.cluster}")
        + Text(f", {profile.provenance.kind}")
    )
    out.print(how(run), style="dim")
    if run.cluster.device.peak and run.cluster.device.peak_flops(strategy.param_dtype) is None:
        out.print(
            f"Note: {run.cluster.device.name} has no fast {strategy.param_dtype}; consider fp16 or "
            "fp32 with --precision."
        )
    out.print()
    out.print(_headline(profile))
    if memory.verdict == "does not fit":
        from shardwise.predict.fit import why_not

        for sentence in why_not(profile, strategy):
            out.print(sentence)
    out.print()
    out.print(_memory_table(profile, strategy))
    wasted = padding_share(profile)
    if wasted > 0.02:
        out.print(
            f"\nPadding: {wasted:.0%} of what is sharded is empty, because some tensors have fewer "
            f"rows than the {strategy.shard} devices that share them. Smaller groups waste less."
        )
    if memory.host_bytes:
        out.print(f"Offloaded to host memory per device: {show_gib(memory.host_bytes)}")
    out.print()
    out.print(_traffic_table(profile) if profile.traffic else "Nothing moves over the network.")
    if profile.work:
        out.print()
        out.print(_work(profile))
        out.print(_time(run, profile))
    if memory.verdict != "fits":
        out.print()
        print_ways(out, ways, safely=memory.verdict == "at risk")


def padding_share(profile: StepProfile) -> float:
    """The share of the sharded parameters that is padding of dimension 0."""
    shard = profile.strategy["shard"]
    held = profile.known_memory.terms["parameters"] * shard
    real = profile.model["parameters"] * DTYPE_BYTES[profile.strategy["master_dtype"]]
    return 1 - real / held if held else 0.0


def _headline(profile: StepProfile) -> Text:
    memory = profile.known_memory
    assert memory.verdict is not None
    assert memory.capacity_bytes is not None
    words = VERDICTS[memory.verdict]
    head = Text(f"{words.alone.capitalize()}.", style=f"bold {COLOURS[words.tone]}")
    peak, capacity = memory.peak_allocated_bytes, memory.capacity_bytes
    head += Text(f" Tensors peak at {show_gib(peak)} of each device's {show_gib(capacity)}.")
    if memory.occupied_bytes:
        low, high = (size / GIB for size in memory.occupied_bytes)
        head += Text(f"\nWith allocator reserve and runtime it takes {low:.1f} to {high:.1f} GiB.")
    return head


def _memory_table(profile: StepProfile, strategy: Strategy) -> Table:
    memory = profile.known_memory
    assert memory.capacity_bytes is not None
    unit, factor = ("GiB", GIB) if memory.peak_allocated_bytes >= GIB else ("MiB", 2**20)
    table = plain_table()
    table.add_column(f"At the peak ({memory.peak_phase})", no_wrap=True)
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("of the device", no_wrap=True)
    for term, size in memory.terms.items():
        # What rounds to nothing says nothing; the sum below still holds it.
        if size / factor >= 0.005:
            share = _bar(size / memory.capacity_bytes)
            table.add_row(_label(term, strategy), f"{size / factor:,.2f}", share)
    peak = memory.peak_allocated_bytes
    table.add_row(
        Text("together", style="bold"),
        Text(f"{peak / factor:,.2f}", style="bold"),
        _bar(peak / memory.capacity_bytes),
    )
    return table


def _label(term: str, strategy: Strategy) -> str:
    share = f"1/{strategy.shard} of all, " if (strategy.shard or 1) > 1 else ""
    detail = {
        "parameters": f"{share}{strategy.master_dtype}",
        "gradients": f"{share}{strategy.master_dtype}",
        "optimizer": f"{share}{strategy.master_dtype}",
        "unsharded_parameters": strategy.param_dtype,
        "reduce_buffers": strategy.reduce_dtype,
    }.get(term)
    copies = term == "unsharded_parameters" and not strategy.sharded
    name = "working copies of parameters" if copies else TERMS[term]
    return f"{name} ({detail})" if detail else name


def _bar(share: float) -> Text:
    return bar(share) + Text(f" {share:4.0%}" if share < 9.995 else f" {share:.0f}x")


def _traffic_table(profile: StepProfile) -> Table:
    table = plain_table()
    table.add_column("Moves in one step", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    table.add_column("sent per device", justify="right", no_wrap=True)
    for collective in profile.traffic:
        table.add_row(
            f"{collective.op.replace('_', '-')}, groups of {collective.group_size}",
            f"{collective.calls:,}",
            show_gb(collective.bytes / collective.calls),
            show_gb(collective.bytes),
            show_gb(collective.sent_bytes),
        )
    return table


def _work(profile: StepProfile) -> str:
    work = profile.work
    assert work is not None
    devices = profile.cluster["devices"]
    again = work.hardware_flops / work.model_flops - 1
    extra = f", {again:.0%} more with recomputation" if again > 0.0005 else ""
    return (
        f"One step: {work.tokens:,} tokens, "
        f"{work.model_flops / devices / 1e12:,.1f} TFLOP per device{extra}."
    )


def _time(run: RunSpec, profile: StepProfile) -> str:
    """How long a step takes and on what, or why that is not known."""
    time, rates = profile.time, profile.throughput
    if time is None or rates is None:
        if run.cluster.nodes > 1 and run.cluster.network is None:
            return "Its time needs the network: add it to the cluster, such as @400Gbps."
        return f"Its time is not known: no step time was fitted for {run.cluster.device.name}."
    low, high = time.step_s_interval or (time.step_s, time.step_s)
    parts = {
        "computing": time.compute_s,
        "waiting for the network": time.exposed_communication_s,
        "copying": time.exposed_copy_s,
        "in the optimizer": time.optimizer_s,
    }
    shares = [(name, (part or 0.0) / time.step_s) for name, part in parts.items()]
    told = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= 0.005)
    mfu = f", MFU {rates.mfu:.0%}" if rates.mfu is not None else ""
    between = f"{show_seconds(low)} to {show_seconds(high)}"
    return (
        f"It takes {show_seconds(time.step_s)} ({between}): {told}.\n"
        f"That is {rates.tokens_per_s:,.0f} tokens/s, {rates.tokens_per_s_per_device:,.0f} per "
        f"device{mfu}.{not_compared(run.cluster)}"
    )


def not_compared(cluster: ClusterSpec) -> str:
    """A sentence for devices whose coefficients are those of a relative."""
    if is_fitted(cluster):
        return ""
    return (
        f"\nNothing was fitted for {cluster.device.name}: times assume the efficiency of a "
        "relative, and published runs on such devices took up to 50% longer."
    )


def print_ways(out: Console, ways: Sequence[Change], safely: bool, of: str = "") -> None:
    if not ways:
        out.print(
            "No change of settings makes it fit; it takes a shorter sequence, a larger device, or "
            "tensor parallelism (which shardwise does not run)."
        )
        return
    whose = f" (options of '{of}')" if of else ""
    out.print(Text(f"It would fit{' safely' if safely else ''} with{whose}", style="bold"))
    for way in ways:
        host = f", and {show_gib(way.host_bytes)} of the host per device" if way.host_bytes else ""
        risk = ", at risk" if way.at_risk else ""
        out.print(f"  {way.options}: {show_gib(way.peak_bytes)}{host}{risk}")
