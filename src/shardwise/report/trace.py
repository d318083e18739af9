"""The screen of `shardwise trace`: the cause first, then where the time went."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.observe.summary import RankSummary, Summary
from shardwise.report.estimate import WIDTH, plain_table
from shardwise.spec.quantity import show_gb
from shardwise.timeline.breakdown import Breakdown

MILLISECOND = 1e6
# A part of the time that is worth a sentence.
NOTICED = 0.05
MOST_UNITS = 12


def print_trace(summary: Summary, console: Console | None = None) -> None:
    out = console or Console(highlight=False, markup=False, emoji=False)
    out.width = min(WIDTH, out.width)
    for sentence in verdicts(summary):
        out.print(sentence)
    out.print()
    out.print(_table(summary))
    for rank in summary.ranks:
        for problem in rank.problems:
            out.print(f"{rank.path.name}: {problem}.", style="yellow")
    _print_collectives(out, summary)
    _print_units(out, summary)
    if summary.joined is not None:
        _print_joined(out, summary)
    if any(rank.on_cpu for rank in summary.ranks):
        out.print(
            "\nThis ran on a CPU: communication takes a core even where it is hidden, and shares "
            "say nothing about a GPU.",
            style="dim",
        )


def _shares(whole: Breakdown) -> dict[str, float]:
    window = whole.window_ns or 1
    return {
        "waiting for communication": whole.exposed_communication_ns / window,
        "copying": whole.exposed_copy_ns / window,
        "idle": whole.idle_ns / window,
    }


def verdicts(summary: Summary) -> list[Text | str]:
    """The largest loss and who causes it, in at most three sentences."""
    ranks = summary.ranks
    mean = {
        name: sum(_shares(r.whole)[name] for r in ranks) / len(ranks)
        for name in _shares(ranks[0].whole)
    }
    name, share = max(mean.items(), key=lambda item: item[1])
    compute = sum(r.whole.compute_ns / (r.whole.window_ns or 1) for r in ranks) / len(ranks)
    found: list[Text | str] = []
    if share < NOTICED:
        found.append(Text(f"Healthy: {compute:.1%} of the time computes.", style="bold green"))
    else:
        found.append(Text(f"{share:.1%} of the time is lost {_words(name)}.", style="bold"))
        if name == "waiting for communication":
            worst = max(
                (c for r in ranks for c in r.collectives), key=lambda c: c.exposed_ns, default=None
            )
            if worst is not None:
                exposed = worst.exposed_ns / max(1, worst.total_ns)
                found.append(
                    f"Most of it is {worst.operation}: {worst.calls:,} calls, {exposed:.0%} of "
                    "their time with nothing computing beside them."
                )
    joined = summary.joined
    if joined is not None:
        late = joined.last_to_arrive()
        waiting = float(joined.waiting_ns.mean()) / max(1.0, joined.mean_ns)
        worst_rank = int(late.argmax())
        number = ranks[worst_rank].rank
        found.append(
            f"{waiting:.0%} of communication is waiting for others; rank "
            f"{number if number is not None else worst_rank} is last in {late[worst_rank]} of "
            f"{late.sum()} collectives."
        )
    return found[:3]


def _words(name: str) -> str:
    return {"idle": "idle: nothing was given to the device", "copying": "to copies"}.get(name, name)


def _table(summary: Summary) -> Table:
    table = plain_table()
    for column in ("rank", "window", "compute", "exposed", "copies", "idle", "overlap", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in summary.ranks:
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


def _print_collectives(out: Console, summary: Summary) -> None:
    rows = [(rank, one) for rank in summary.ranks for one in rank.collectives]
    if not rows:
        return
    table = plain_table()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("collective", no_wrap=True)
    for column in ("calls", "bytes", "time", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank, one in rows[:12]:
        table.add_row(
            "?" if rank.rank is None else str(rank.rank),
            one.operation,
            f"{one.calls:,}",
            "unknown" if one.moved_bytes is None else show_gb(one.moved_bytes),
            f"{one.total_ns / MILLISECOND:,.2f} ms",
            f"{one.exposed_ns / MILLISECOND:,.2f} ms",
        )
    out.print()
    out.print(table)
    if len(rows) > 12:
        out.print(f"and {len(rows) - 12} more", style="dim")


def _print_units(out: Console, summary: Summary) -> None:
    """FSDP units of the first rank that has them: milliseconds, and how much of it is exposed."""
    rank = next((r for r in summary.ranks if r.units), None)
    if rank is None:
        return
    table = plain_table()
    table.add_column(f"FSDP unit (rank {rank.rank})", no_wrap=True)
    for column in ("forward", "backward", "gather fwd", "gather bwd", "scatter"):
        table.add_column(column, justify="right", no_wrap=True)

    def alone(total: int) -> str:
        return _milliseconds(total) if total else "-"

    def both(total: int, exposed: int) -> str:
        return f"{_milliseconds(total)} ({_milliseconds(exposed)})" if total else "-"

    for unit in rank.units[:MOST_UNITS]:
        table.add_row(
            unit.unit,
            alone(unit.forward_ns),
            alone(unit.backward_ns),
            both(unit.gather_forward_ns, unit.gather_forward_exposed_ns),
            both(unit.gather_backward_ns, unit.gather_backward_exposed_ns),
            both(unit.scatter_ns, unit.scatter_exposed_ns),
        )
    out.print()
    out.print(table)
    more = len(rank.units) - MOST_UNITS
    rest = f"; {more} more units in --json" if more > 0 else ""
    out.print(f"Milliseconds, in brackets those with no compute beside them{rest}.", style="dim")


def _milliseconds(nanoseconds: int) -> str:
    """Three digits or so: a row of five such has to fit."""
    value = nanoseconds / MILLISECOND
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _print_joined(out: Console, summary: Summary) -> None:
    joined = summary.joined
    assert joined is not None
    late = joined.last_to_arrive()
    out.print(
        f"\nJoined over {len(summary.ranks)} ranks: {joined.start_ns.shape[1]:,} collectives, "
        f"{joined.mean_ns / MILLISECOND:,.2f} ms of kernels per rank, of which "
        f"{joined.transfer_ns / MILLISECOND:,.2f} ms are transfer and the rest waiting."
    )
    names = [str(r.rank if r.rank is not None else i) for i, r in enumerate(summary.ranks)]
    order = sorted(range(len(names)), key=lambda i: -int(late[i]))
    told = ", ".join(f"rank {names[i]} in {late[i]}" for i in order[:4] if late[i])
    out.print(f"Last to arrive: {told}.")
    lost = [f"rank {names[i]} {n}" for i, n in enumerate(joined.unmatched) if n]
    if lost:
        out.print(f"Collectives without a partner: {', '.join(lost)}.", style="yellow")
