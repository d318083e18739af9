"""The screen of `shardwise trace`: the main cause first, then tables of where time goes.

Every time on this screen is per step. The parts of a table sum to what the table above it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from statistics import median

from rich.console import Console
from rich.text import Text

from shardwise.observe.analysis import Trace
from shardwise.observe.diagnosis.communication import link_of, transfers_of
from shardwise.observe.diagnosis.verdict import (
    OVERLAPPING,
    Health,
    Verdict,
    count,
    duration,
    plural,
)
from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.calls import CollectiveTime
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rank.units import UnitTime
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.report.screen import plain_table, screen, terminal_table
from shardwise.report.trace_ranks import EXPOSED, ranks_table, ranks_to_show
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_gb
from shardwise.step.words import milliseconds, percent

MAX_RANKS, MAX_UNITS, MAX_CAUSES = 8, 12, 5
UNIT_COLUMNS = ("forward", "backward", "copies", "gather fwd", "gather bwd", "scatter")


def print_trace(trace: Trace, console: Console | None = None) -> None:
    """Print the main cause in three lines, then the tables."""
    out = screen(console)
    summary, health, cluster = trace.summary, trace.health, trace.cluster
    verdicts, thresholds = list(trace.verdicts), trace.rules.thresholds
    _print_verdicts(out, verdicts, health)
    _print_ranks(out, summary, verdicts, health, thresholds)
    _print_collectives(out, summary, health, cluster)
    _print_units(out, summary)
    _print_details(out, summary, cluster)
    for rank in summary.ranks:
        for problem in rank.problems:
            out.print(f"Warning: {rank.path.name}: {problem}.", style="yellow")


def _print_verdicts(out: Console, verdicts: list[Verdict], health: Health) -> None:
    """Print the main cause of lost time with its fix, then a table of other causes.

    Without causes, print the health of the run in one sentence.
    """
    if not verdicts:
        out.print(Text(health.words(), style="bold green" if health.healthy else "bold"))
        return
    first = verdicts[0].explain(health)
    out.print(Text(first.result, style="bold"))
    out.print(first.evidence)
    out.print(f"Suggested fix: {first.fix}")
    rest = verdicts[1:MAX_CAUSES]
    if not rest:
        return
    out.print()
    table = plain_table()
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("other causes", no_wrap=True)
    for one in rest:
        share = percent(one.saves_ns / health.step_ns, 1)
        table.add_row(duration(one.saves_ns), share, one.explain(health).title)
    out.print(table)
    out.print(OVERLAPPING, style="dim")


def period_of(steps: int) -> str:
    """What the times of a table are averaged over, such as "average of 3 steps"."""
    if not steps:
        return "full trace, no steps marked"
    return "1 step" if steps == 1 else f"average of {steps:,} steps"


def _print_ranks(
    out: Console,
    summary: Summary,
    verdicts: list[Verdict],
    health: Health,
    thresholds: Thresholds,
) -> None:
    """Print the parts of a step by rank, for ranks in verdicts and those that compute least."""
    shown = ranks_to_show(summary, verdicts, MAX_RANKS)
    out.print()
    title = "Time per step by rank" if health.steps else "Time by rank"
    out.print(f"{title} (ms and share; {period_of(health.steps)})", style="bold")
    out.print(terminal_table(ranks_table(summary, shown, thresholds)))
    more = len(summary.ranks) - len(shown)
    if more:
        out.print(f"{plural(more, 'more rank')} in --json.", style="dim")
    out.print(EXPOSED, style="dim")


def _print_collectives(
    out: Console, summary: Summary, health: Health, cluster: ClusterSpec | None
) -> None:
    """Print a table of collectives by operation: calls, bytes and times per step."""
    by_name: dict[str, list[tuple[RankSummary, CollectiveTime]]] = {}
    for rank in summary.ranks:
        for one in rank.collectives:
            by_name.setdefault(one.operation, []).append((rank, one))
    if not by_name:
        return
    ranks = len(summary.ranks)
    matched = summary.joined is not None
    table = plain_table()
    table.add_column("collective", no_wrap=True)
    columns = ["calls", "bytes", "time", *(["waiting"] if matched else []), "exposed",
               "bus bandwidth", *(["of link"] if cluster is not None else [])]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)

    def per_step(found: list[tuple[RankSummary, CollectiveTime]], field: str) -> float:
        return sum(rank.per_step(getattr(one, field)) for rank, one in found) / ranks

    waits = _waiting_by_operation(summary)
    for name, found in sorted(by_name.items(), key=lambda i: -per_step(i[1], "exposed_ns")):
        known = all(one.moved_bytes is not None for _, one in found)
        rates = [one.bus_bytes_per_s for _, one in found if one.bus_bytes_per_s is not None]
        row = [
            name,
            count(per_step(found, "calls")),
            show_gb(per_step(found, "moved_bytes")) if known else "unknown",
            duration(per_step(found, "total_ns")),
            *([duration(waits[name])] if matched else []),
            duration(per_step(found, "exposed_ns")),
            f"{show_gb(median(rates))}/s" if rates else "unknown",
        ]
        if cluster is not None:
            link = (
                _link_bandwidth(summary, cluster, name, found[0][1].group_size) if rates else None
            )
            row.append(percent(median(rates) / link) if link else "unknown")
        table.add_row(*row)
    out.print()
    average = f"average of {plural(ranks, 'rank')}, " if ranks > 1 else ""
    period = "per step" if health.steps else "full trace"
    out.print(f"Collectives ({average}{period})", style="bold")
    out.print(table)
    if matched:
        _print_last_to_arrive(out, summary)
    elif any((rank.world_size or 1) > 1 for rank in summary.ranks):
        out.print("Times include waiting for ranks whose traces were not given.", style="dim")


def _link_bandwidth(
    summary: Summary, cluster: ClusterSpec, operation: str, group_size: int | None
) -> float | None:
    """Bytes/s of the link that an operation uses; None if the group size is unknown."""
    if not group_size:
        return None
    key = next(
        key
        for rank in summary.ranks
        for key, name in zip(rank.calls.key, rank.calls.operation, strict=True)
        if name == operation
    )
    return link_of(cluster, key, group_size)


def _waiting_by_operation(summary: Summary) -> dict[str, float]:
    """Nanoseconds of waiting (time beyond the transfer) by operation, per step.

    An average over ranks.
    """
    waits: dict[str, float] = {}
    for rank, transfer in zip(summary.ranks, transfers_of(summary), strict=True):
        if transfer is None:
            continue
        _, durations = rank.calls.inside(rank.span)
        waiting: Ints = durations - transfer
        for name, known, wait in zip(
            rank.calls.operation, (transfer >= 0).tolist(), waiting.tolist(), strict=True
        ):
            waits[name] = waits.get(name, 0.0) + rank.per_step(max(0, wait) if known else 0)
    return {name: wait / len(summary.ranks) for name, wait in waits.items()}


def _print_last_to_arrive(out: Console, summary: Summary) -> None:
    """Print which ranks most often arrive last at collectives, and unmatched ones."""
    joined = summary.joined
    assert joined is not None
    late = joined.last_to_arrive()
    order = sorted(range(len(summary.ranks)), key=lambda i: -int(late[i]))
    names = [f"{summary.ranks[i].name} {late[i]:,}×" for i in order[:4] if late[i]]
    if names:
        waited = plural(int(late.sum()), "collective")
        out.print(f"Last to arrive in {waited} with waiting: {', '.join(names)}.", style="dim")
    unmatched = [f"{summary.ranks[i].name} {n:,}" for i, n in enumerate(joined.unmatched) if n]
    if unmatched:
        more = f" and {len(unmatched) - 4} more ranks" if len(unmatched) > 4 else ""
        out.print(
            f"Warning: collectives that no other trace has: {', '.join(unmatched[:4])}{more}.",
            style="yellow",
        )


def _print_units(out: Console, summary: Summary) -> None:
    """Print times per step of the FSDP units of the first rank that has units."""
    rank = next((r for r in summary.ranks if r.units), None)
    if rank is None:
        return
    table = plain_table()
    table.add_column("unit", overflow="fold")
    for column in UNIT_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    rows = merge_equal_rows([(unit.unit, unit_cells(unit, rank, _short)) for unit in rank.units])
    for name, cells in rows[:MAX_UNITS]:
        table.add_row(name, *cells)
    out.print()
    period = "ms per step" if rank.steps else "ms in the full trace"
    out.print(f"FSDP units of {rank.name} ({period}; exposed part in brackets)", style="bold")
    out.print(table)
    more = len(rows) - MAX_UNITS
    if more > 0:
        out.print(f"{plural(more, 'more row')} in --json.", style="dim")


def unit_cells(unit: UnitTime, rank: RankSummary | None, show: Callable[[float], str]) -> list[str]:
    """Cells of UNIT_COLUMNS: `show` of nanoseconds per step of `rank`.

    Without a rank, the times of `unit` are those of one simulated step.
    """

    def shown(total: int) -> str:
        return show(rank.per_step(total) if rank is not None else total)

    def compute(total: int) -> str:
        return shown(total) if total else "-"

    def communication(total: int, exposed: int) -> str:
        return f"{shown(total)} ({shown(exposed)})" if total else "-"

    return [
        compute(unit.forward_ns),
        compute(unit.backward_ns),
        compute(unit.copy_ns),
        communication(unit.gather_forward_ns, unit.gather_forward_exposed_ns),
        communication(unit.gather_backward_ns, unit.gather_backward_exposed_ns),
        communication(unit.scatter_ns, unit.scatter_exposed_ns),
    ]


def merge_equal_rows(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Merge neighbouring rows (name, cells) with equal cells into one row.

    The merged row is named after the first and the last, such as "layers.0-11".
    """
    merged = []
    for cells, group in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in group]
        merged.append((names[0] if len(names) == 1 else _range(names[0], names[-1]), cells))
    return merged


def _range(first: str, last: str) -> str:
    """A name for consecutive units: `layers.0` and `layers.11` become `layers.0-11`."""
    stem, _, number = last.rpartition(".")
    same = stem and first.startswith(f"{stem}.")
    return f"{first}-{number}" if same else f"{first} to {last}"


def _short(nanoseconds: float) -> str:
    """Milliseconds without a unit, short enough for nine in a row."""
    return milliseconds(nanoseconds, ".1f", 9.95)


def _print_details(out: Console, summary: Summary, cluster: ClusterSpec | None) -> None:
    """Micro-batches, slowdown by communication, matmul throughput, and a remark on CPUs."""
    lines = [*_micro_batches(summary), *_slowdown(summary), *_matmuls(summary, cluster)]
    if any(rank.on_cpu for rank in summary.ranks):
        lines.append(
            "Measured on a CPU: communication takes a core even when hidden; shares do not carry "
            "over to GPUs."
        )
    if lines:
        out.print()
    for line in lines:
        out.print(line)


def _micro_batches(summary: Summary) -> list[str]:
    """Sentences on collectives per kind of micro-batch; empty if none are marked."""
    rank = next((r for r in summary.ranks if r.micro_batches), None)
    if rank is None:
        return []
    lines = []
    for kind in rank.micro_batches:
        what = "reduce gradients" if kind.reduces else "only accumulate gradients"
        each = kind.number or 1
        lines.append(
            f"{kind.number:,} micro-batch{'' if kind.number == 1 else 'es'} {what}: "
            f"{kind.gathers / each:,.0f} all-gathers, {kind.reductions / each:,.0f} reductions, "
            f"{duration(kind.exposed_ns / each)} exposed in each."
        )
    return lines


def _slowdown(summary: Summary) -> list[str]:
    """Sentence on how much compute slows down during communication; empty if not measured."""
    slowed = [r.slowdown for r in summary.ranks if r.slowdown is not None]
    if not slowed:
        return []
    change = median(s.ratio for s in slowed) - 1
    kernels = plural(sum(s.kernels for s in slowed), "kernel")
    if percent(abs(change)) == "0%":
        return [f"Communication does not slow down compute (measured on {kernels})."]
    pace = "slower" if change > 0 else "faster"
    return [
        f"Compute is {percent(abs(change))} {pace} while communication runs "
        f"(measured on {kernels})."
    ]


def _matmuls(summary: Summary, cluster: ClusterSpec | None) -> list[str]:
    """Sentence on the median matmul throughput in FLOP/s; empty if not measured."""
    products = [r.matmul for r in summary.ranks if r.matmul is not None]
    if not products:
        return []
    rate = median(m.flops_per_s for m in products)
    peak = cluster.device.peak_flops(products[0].dtype) if cluster else None
    share = f" ({percent(rate / peak)} of {cluster.device.name})" if peak and cluster else ""
    return [f"Matmuls in {products[0].dtype}: {rate / 1e12:,.3g} TFLOP/s{share}."]
