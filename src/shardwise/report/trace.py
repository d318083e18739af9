"""The screen of `shardwise trace`: the cause first, then where the time went."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.observe.rank.calls import CollectiveTime
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.observe.why.communication import link_of
from shardwise.observe.why.verdict import Verdict, sentence
from shardwise.observe.why.verdicts import Health, health_of
from shardwise.report.screen import plain_table, screen
from shardwise.report.words import MILLISECOND, milliseconds
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_gb

MOST_RANKS, MOST_UNITS, MOST_CAUSES = 8, 12, 5


def print_trace(
    summary: Summary,
    verdicts: list[Verdict],
    thresholds: Thresholds,
    cluster: ClusterSpec | None = None,
    console: Console | None = None,
) -> None:
    """The cause in the first three lines; everything else below."""
    out = screen(console)
    health = health_of(summary, thresholds)
    _print_verdicts(out, verdicts, health)
    out.print()
    out.print(_checks(health, thresholds))
    out.print()
    _print_ranks(out, summary)
    for rank in summary.ranks:
        for problem in rank.problems:
            out.print(f"{rank.path.name}: {problem}.", style="yellow")
    _print_collectives(out, summary, cluster)
    _print_units(out, summary)
    _print_micro_batches(out, summary)
    _print_speeds(out, summary, cluster)
    _print_joined(out, summary)
    if any(rank.on_cpu for rank in summary.ranks):
        out.print(
            "\nThis ran on a CPU: communication takes a core even where it is hidden, and shares "
            "say nothing about a GPU.",
            style="dim",
        )


def _print_verdicts(out: Console, verdicts: list[Verdict], health: Health) -> None:
    if health.healthy:
        out.print(Text(f"Healthy: {health.compute:.1%} of the time computes.", style="bold green"))
        return
    if not verdicts:
        out.print(
            Text(f"{health.compute:.1%} of the time computes; no single cause.", style="bold")
        )
        return
    first = verdicts[0]
    share = first.saves_ns / health.step_ns
    out.print(Text(f"{first.statement} ({share:.0%}).", style="bold"))
    out.print(f"{sentence(first.evidence)}.")
    out.print(f"To change: {first.change}.")
    rest = verdicts[1:MOST_CAUSES]
    if not rest:
        return
    out.print()
    table = plain_table()
    table.add_column("then", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in rest:
        table.add_row(f"{one.saves_ns / health.step_ns:.1%}", f"{one.statement}.")
    out.print(table)


def _checks(health: Health, limits: Thresholds) -> Text:
    """The usual figures of one step, and whether they are as they should be."""

    def one(good: bool, text: str, wanted: str) -> Text:
        return Text(text, style="green" if good else "yellow") + Text(f" ({wanted})", style="dim")

    idle = health.idle_ns / MILLISECOND
    parts = [
        Text(f"{'step' if health.steps else 'trace'} {_milliseconds(health.step_ns)} ms"),
        one(health.compute >= limits.compute, f"compute {health.compute:.1%}",
            f">{limits.compute:.0%}"),
        one(idle <= limits.idle_ms, f"idle {_milliseconds(health.idle_ns)} ms",
            f"<{limits.idle_ms:,.0f}"),
    ]  # fmt: skip
    if health.overlap is not None:
        good = health.overlap >= limits.overlap
        parts.append(one(good, f"overlap {health.overlap:.1%}", f">{limits.overlap:.0%}"))
    return Text("   ").join(parts)


def _print_ranks(out: Console, summary: Summary) -> None:
    shown = sorted(summary.ranks, key=lambda r: r.whole.compute_ns / (r.whole.window_ns or 1))
    shown = sorted(shown[:MOST_RANKS], key=summary.ranks.index)
    out.print(_table(shown))
    more = len(summary.ranks) - len(shown)
    if more:
        out.print(f"and {more} more, which compute more of their time", style="dim")


def _table(ranks: list[RankSummary]) -> Table:
    table = plain_table()
    for column in ("rank", "window", "compute", "exposed", "copies", "idle", "overlap", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in ranks:
        whole = rank.whole
        window = whole.window_ns or 1
        table.add_row(
            "?" if rank.rank is None else str(rank.rank),
            f"{window / MILLISECOND:,.1f} ms",
            f"{whole.compute_ns / window:.2%}",
            f"{whole.exposed_communication_ns / window:.2%}",
            f"{whole.exposed_copy_ns / window:.2%}",
            f"{whole.idle_ns / window:.2%}",
            "-" if whole.overlap is None else f"{whole.overlap:.2%}",
            _steps(rank),
        )
    return table


def _steps(rank: RankSummary) -> str:
    lengths = [step.window_ns / MILLISECOND for step in rank.steps]
    return f"{len(lengths)} of {median(lengths):,.1f} ms" if lengths else "-"


def _print_collectives(out: Console, summary: Summary, cluster: ClusterSpec | None) -> None:
    """Sums of the average rank, by operation."""
    by_name: dict[str, list[CollectiveTime]] = {}
    for rank in summary.ranks:
        for one in rank.collectives:
            by_name.setdefault(one.operation, []).append(one)
    if not by_name:
        return
    ranks = len(summary.ranks)
    table = plain_table()
    table.add_column("collective", no_wrap=True)
    for column in ("calls", "bytes", "time", "exposed", "bus"):
        table.add_column(column, justify="right", no_wrap=True)
    if cluster is not None:
        table.add_column("of link", justify="right", no_wrap=True)
    for name, found in sorted(by_name.items(), key=lambda i: -sum(o.exposed_ns for o in i[1])):
        moved = [one.moved_bytes for one in found if one.moved_bytes is not None]
        rates = [one.bus_bytes_per_s for one in found if one.bus_bytes_per_s is not None]
        row = [
            name,
            f"{sum(one.calls for one in found) / ranks:,.0f}",
            show_gb(sum(moved) / ranks) if len(moved) == len(found) else "unknown",
            f"{_milliseconds(sum(one.total_ns for one in found) / ranks)} ms",
            f"{_milliseconds(sum(one.exposed_ns for one in found) / ranks)} ms",
            f"{show_gb(median(rates))}/s" if rates else "unknown",
        ]
        if cluster is not None:
            size = found[0].group_size
            key = next(
                k
                for r in summary.ranks
                for k, op in zip(r.calls.key, r.calls.operation, strict=True)
                if op == name
            )
            link = link_of(cluster, key, size) if size and rates else None
            row.append(f"{median(rates) / link:.0%}" if link else "unknown")
        table.add_row(*row)
    out.print()
    out.print(table)
    average = "Of the average rank. " if ranks > 1 else ""
    out.print(f"{average}Bus bandwidth counts the time spent waiting for other ranks.", style="dim")


def _print_units(out: Console, summary: Summary) -> None:
    """FSDP units of the first rank that has them: milliseconds, and how much of it is exposed."""
    rank = next((r for r in summary.ranks if r.units), None)
    if rank is None:
        return
    table = plain_table()
    table.add_column(f"FSDP unit ({rank.name})", no_wrap=True)
    for column in ("forward", "backward", "copies", "gather fwd", "gather bwd", "scatter"):
        table.add_column(column, justify="right", no_wrap=True)

    def alone(total: int) -> str:
        return _short(total) if total else "-"

    def both(total: int, exposed: int) -> str:
        return f"{_short(total)} ({_short(exposed)})" if total else "-"

    rows = [
        (
            unit.unit,
            [
                alone(unit.forward_ns),
                alone(unit.backward_ns),
                alone(unit.copy_ns),
                both(unit.gather_forward_ns, unit.gather_forward_exposed_ns),
                both(unit.gather_backward_ns, unit.gather_backward_exposed_ns),
                both(unit.scatter_ns, unit.scatter_exposed_ns),
            ],
        )
        for unit in rank.units
    ]
    shown = merged(rows)
    for name, cells in shown[:MOST_UNITS]:
        table.add_row(name, *cells)
    out.print()
    out.print(table)
    more = len(shown) - MOST_UNITS
    rest = f"; {more} more rows in --json" if more > 0 else ""
    out.print(f"Milliseconds, in brackets those with no compute beside them{rest}.", style="dim")


def merged(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Neighbours that would read the same, as one row with the first and the last name."""
    found = []
    for cells, group in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in group]
        found.append((names[0] if len(names) == 1 else _range(names[0], names[-1]), cells))
    return found


def _range(first: str, last: str) -> str:
    """`layers.0` and `layers.11` as `layers.0-11`."""
    stem, _, number = last.rpartition(".")
    same = stem and first.startswith(f"{stem}.")
    return f"{first}-{number}" if same else f"{first} to {last}"


def _short(nanoseconds: float) -> str:
    """A row of nine such has to fit."""
    return milliseconds(nanoseconds, ".1f", 9.95)


def _milliseconds(nanoseconds: float) -> str:
    return milliseconds(nanoseconds, ".1f", 99.95)


def _print_micro_batches(out: Console, summary: Summary) -> None:
    rank = next((r for r in summary.ranks if r.micro_batches), None)
    if rank is None:
        return
    out.print()
    for kind in rank.micro_batches:
        what = "reduce gradients" if kind.reduces else "only add them up"
        each = kind.number or 1
        out.print(
            f"{kind.number} micro-batches {what}: {kind.gathers / each:,.0f} gathers, "
            f"{kind.reductions / each:,.0f} reductions and "
            f"{_milliseconds(kind.exposed_ns / each)} ms exposed in each."
        )


def _print_speeds(out: Console, summary: Summary, cluster: ClusterSpec | None) -> None:
    slowed = [r.slowdown for r in summary.ranks if r.slowdown is not None]
    if slowed:
        out.print(
            f"\nCompute takes {median(s.ratio for s in slowed):.2f} times as long beside "
            f"communication, by {sum(s.kernels for s in slowed):,} kernels that also ran alone."
        )
    products = [r.matmul for r in summary.ranks if r.matmul is not None]
    if products:
        rate = median(m.flops_per_s for m in products)
        peak = cluster.device.peak_flops(products[0].dtype) if cluster else None
        share = f", {rate / peak:.0%} of {cluster.device.name}" if peak and cluster else ""
        out.print(
            f"\nMatrix products in {products[0].dtype} run at {rate / 1e12:,.3g} TFLOP/s{share}."
        )


def _print_joined(out: Console, summary: Summary) -> None:
    joined = summary.joined
    if joined is None:
        return
    late = joined.last_to_arrive()
    out.print(
        f"\nJoined over {len(summary.ranks)} ranks: {joined.collectives:,} collectives, "
        f"{joined.mean_ns / MILLISECOND:,.2f} ms of them per rank. Those that wait for nobody take "
        f"{joined.transfer_ns / MILLISECOND:,.2f} ms; the rest is waiting."
    )
    order = sorted(range(len(summary.ranks)), key=lambda i: -int(late[i]))
    told = ", ".join(f"{summary.ranks[i].name} in {late[i]}" for i in order[:4] if late[i])
    if told:
        out.print(f"Last to arrive: {told}.")
    lost = [f"{summary.ranks[i].name} {n}" for i, n in enumerate(joined.unmatched) if n]
    if lost:
        more = f" and {len(lost) - 4} more ranks" if len(lost) > 4 else ""
        out.print(f"Collectives without a partner: {', '.join(lost[:4])}{more}.", style="yellow")
