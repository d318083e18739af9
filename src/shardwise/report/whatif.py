"""The screens and tables of `shardwise whatif`: studies, differences, thresholds, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from shardwise.planning.difference import Difference, difference
from shardwise.planning.money import Budget
from shardwise.planning.problem import Problem
from shardwise.planning.threshold import MOST_DEVICES, Target, Threshold
from shardwise.planning.vary import needs_network
from shardwise.planning.whatif import Point
from shardwise.report.money import (
    added_cost_cells,
    added_cost_columns,
    cost_cells,
    cost_columns,
    cost_words,
    list_price_words,
    show_duration,
    tokens_words,
)
from shardwise.report.screen import bar, bullet, paragraph, screen, terminal_table
from shardwise.report.table import Cell, Column, Table
from shardwise.spec.quantity import GIB, in_gib, show_count, show_seconds
from shardwise.spec.strategy_words import (
    batch_words,
    blocks_of,
    configuration_words,
    layout_words,
    recompute_cell,
    shorthand,
)
from shardwise.spec.wording import without_key
from shardwise.step.words import (
    capital,
    percent,
    percent_points,
    range_text,
    ratio_text,
    signed_percent,
    speed_ratio_text,
)

Study = tuple[str, Sequence[Point]]

# Names of varied quantities: column titles, then nouns in sentences.
_TITLES = {"seq-len": "sequence", "global-batch": "batch"}
_NOUNS = {
    "devices": "number of devices",
    "link": "bandwidth inside a node",
    "memory": "memory per device",
    "global-batch": "global batch",
}


def print_heading(problem: Problem, fixed: bool) -> None:
    """Print one line: the model, the cluster, the job, and how each point is chosen.

    `fixed`: every point keeps the same configuration; otherwise each point is planned again.
    """
    job = problem.job
    batch = f", {show_count(job.global_batch)} tokens per step" if job.global_batch else ""
    how = "same configuration at every point" if fixed else "planned again at every point"
    screen().print(
        Text(problem.model.name, style="bold")
        + Text(f" on {problem.cluster}, sequence length {job.seq_len:,}{batch}, predicted, {how}")
    )


# ---- studies --------------------------------------------------------------------------------


def studies_table(studies: Sequence[Study], budget: Budget, title: str = "value") -> Table:
    """Table of all points of all studies: one row per value, all figures predicted.

    `title` heads the column of values. The name of the varied quantity is a column of CSV only.
    """
    table = Table(
        (
            Column("vary", "vary", left=True, on_screen=False),
            Column("value", title),
            Column("devices", "devices", lambda count: f"{count:,}", on_screen=False),
            Column("layout", "layout", left=True),
            Column("micro_batch", "batch"),
            Column("accumulate", "accumulation", on_screen=False),
            Column("recompute", "recompute", left=True),
            Column("step_s", "step", _short_seconds),
            Column("step_low_s", "step from", _short_seconds, on_screen=False),
            Column("step_high_s", "step to", _short_seconds, on_screen=False),
            Column("tokens_per_s", "tokens/s", _short_count),
            Column("mfu", "MFU", lambda share: percent(share, 1)),
            Column("needed_bytes", "GiB", in_gib),
            Column("binding", "limited by", left=True),
            Column("fitted", "fitted", lambda fitted: "yes" if fitted else "no", on_screen=False),
            *added_cost_columns(budget),
        )
    )
    for name, points in studies:
        for point in points:
            table.add(name, point.value, *_point_cells(point, budget))
    return table


def _point_cells(point: Point, budget: Budget) -> list[Cell | str | float | None]:
    """Cells of a row after its value: configuration, step time, throughput, memory, cost.

    One text cell if no configuration fits or the value is refused.
    """
    c, cluster = point.candidate, point.problem.cluster
    if c is None:
        return [None, Cell(None, "not possible" if point.refused else "none fits")]
    low, high = point.step_s_interval or (None, None)
    return [
        cluster.devices,
        shorthand(c.strategy),
        Cell(c.strategy.micro_batch, batch_words(c.strategy)),
        c.strategy.accumulate,
        Cell(c.strategy.recompute, recompute_cell(c.strategy, blocks_of(point.problem.model))),
        *(c.step_s, low, high, c.tokens_per_s, point.mfu, round(c.needed_bytes)),
        Cell(point.binding, limit_words(point)),
        point.fitted,
        *added_cost_cells(budget, c.tokens_per_s, cluster),
    ]


def limit_words(point: Point) -> str:
    """The bottleneck of a point; for bandwidth, "network" or the name of the intra-node link."""
    if point.binding != "bandwidth":
        return point.binding
    cluster = point.problem.cluster
    return "network" if cluster.nodes > 1 and not point.link_binds else cluster.device.link


def print_study(name: str, points: Sequence[Point], budget: Budget) -> None:
    """Print a study: the points, prediction errors, scaling, changes between values, costs."""
    out = screen()
    out.print()
    title = _TITLES.get(name, name)
    out.print(terminal_table(studies_table([(name, points)], budget, title), gap=1))
    for sentence in accuracy_words(points):
        out.print(sentence, style="dim")
    if not any(point.candidate or point.refused for point in points):
        out.print("No configuration fits. 'shardwise plan' shows the closest and what would help.")
    if name == "devices":
        _print_scaling(out, points)
        told = division_words(points)
        if told:
            out.print()
            out.print(told)
    sentences = [
        f"{point.value}: {without_key(point.refused, name)}." for point in points if point.refused
    ]
    possible = [point for point in points if not point.refused]
    for before, after in pairwise(possible):
        words = _change_words(before, after)
        sentences += [f"{before.value} to {after.value}: {words}"] if words else []
    if sentences:
        out.print()
    for sentence in sentences:
        bullet(out, sentence)
    _print_costs(out, name, points, budget)


def accuracy_words(points: Sequence[Point]) -> list[str]:
    """One sentence on the step-time error of fitted devices, one on that of other devices."""
    sentences = []
    for fitted in (True, False):
        shown = [p for p in points if p.candidate and p.fitted is fitted]
        if not shown:
            continue
        clusters = [p.problem.cluster for p in shown]
        widest = max((p.error_interval for p in shown), key=lambda ends: ends[1])
        ends = range_text(*widest, signed_percent)
        names = ", ".join(dict.fromkeys(cluster.device.name for cluster in clusters))
        if fitted:
            sentences.append(f"Measured steps lie within {ends} of these (nine of ten runs).")
        else:
            sentences.append(
                f"No runs on {names} were fitted: times assume the efficiency of a related device "
                f"and may be off by {ends}."
            )
    return sentences


def _short_seconds(seconds: float) -> str:
    """Seconds or milliseconds with three digits: a table of 80 columns has no room for more."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _short_count(value: float) -> str:
    """A number with three digits and k, M or B, such as "12.3k"."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _print_scaling(out: Console, points: Sequence[Point]) -> None:
    """Print tokens/s per device at each point, as bars relative to the first that fits.

    Nothing is printed if fewer than two points fit.
    """
    fitting = [(p, p.candidate) for p in points if p.candidate]
    if len(fitting) < 2:
        return
    out.print()
    out.print("Scaling: tokens/s per device", style="bold")
    first, c = fitting[0]
    alone = c.tokens_per_s / first.problem.cluster.devices
    for point, candidate in fitting:
        kept = candidate.tokens_per_s / point.problem.cluster.devices / alone
        of_first = "" if point is first else f" of {first.value} devices"
        out.print(
            Text(f"{point.value:>8} ") + bar(min(kept, 1.0)) + Text(f" {percent(kept)}{of_first}")
        )


def division_words(points: Sequence[Point]) -> str:
    """Sentence: up to how many devices pure data parallelism is best, and what replaces it.

    Empty if pure data parallelism is best at every point.
    """
    chosen = [(p.value, p.candidate.strategy) for p in points if p.candidate]
    divided = [strategy.mesh.inner > 1 for _, strategy in chosen]
    if True not in divided:
        return ""
    first = divided.index(True)
    value, strategy = chosen[first]
    told = f"From {value} devices on, {layout_words(strategy)} is best"
    if first:
        told = f"Up to {chosen[first - 1][0]} devices pure data parallelism is best. {told}"
    ends = f"; {chosen[-1][0]} devices use {layout_words(chosen[-1][1])}" if divided[-1] else ""
    return f"{told}{ends if chosen[-1][0] != value else ''}."


def _print_costs(out: Console, name: str, points: Sequence[Point], budget: Budget) -> None:
    """Print the cost of the budget's tokens at each point; nothing without a budget."""
    if not budget.given:
        return
    table = Table((Column("value", _TITLES.get(name, name)), *cost_columns(budget)))
    for point in points:
        if point.candidate is not None:
            speed = point.candidate.tokens_per_s
            table.add(point.value, *cost_cells(budget, speed, point.problem.cluster))
    out.print()
    out.print(f"Cost of {tokens_words(budget)}", style="bold")
    out.print(terminal_table(table))
    if budget.listed is not None:
        paragraph(out, list_price_words(budget))


# ---- differences ----------------------------------------------------------------------------


def _change_words(before: Point, after: Point) -> str:
    """Sentence on what changes between two points; empty if neither has a configuration."""
    change = difference(before, after)
    if change is not None:
        return difference_words(change, blocks_of(before.problem.model))
    if before.candidate is after.candidate:
        return ""
    return "starts to fit." if before.candidate is None else "no longer fits."


def difference_words(change: Difference, blocks: int | None = None) -> str:
    """Sentence: the ratio of speeds, the change of MFU, and the settings that changed.

    Changes that round to nothing are left out. `blocks` is the number of blocks of the model.
    """
    points = percent_points(change.mfu)
    mfu = "same MFU" if points == percent_points(0.0) else f"MFU {points}"
    head = f"{speed_ratio_text(change.speed)}, {mfu}"
    causes = [cause for cause in _causes(change, blocks) if cause]
    return f"{head}; {', '.join(causes)}." if causes else f"{head}."


def _causes(change: Difference, blocks: int | None) -> list[str]:
    """One phrase per setting or figure that differs, such as "micro-batch 2 → 4"."""
    was, now = change.strategies
    causes = []
    if change.layout_changed:
        causes.append(f"{layout_words(was)} → {layout_words(now)}")
    if change.micro_batch_changed:
        causes.append(f"micro-batch {was.micro_batch} → {now.micro_batch}")
    if change.recompute:
        shown = [recompute_cell(strategy, blocks) for strategy in (was, now)]
        causes.append(f"{change.recompute} recompute ({shown[0]} → {shown[1]})")
    if change.exposed:
        shares = [percent(share) for share in change.exposed]
        if shares[0] != shares[1]:
            causes.append(f"exposed communication {shares[0]} → {shares[1]} of the step")
    if change.peak is not None and ratio_text(change.peak) != ratio_text(1.0):
        causes.append(f"{ratio_text(change.peak)} the peak FLOP/s")
    if change.contention:
        causes.append(f"compute {change.contention} slowed by overlapping communication")
    return causes


# ---- thresholds -----------------------------------------------------------------------------


def target_words(target: Target) -> str:
    """A target as a noun phrase, such as "a step of at most 10 s"."""
    if target.quantity == "step":
        return f"a step of at most {show_seconds(target.value)}"
    if target.quantity == "mfu":
        return f"an MFU of at least {percent(target.value)}"
    if target.quantity == "days":
        return f"{show_count(target.tokens)} tokens within {show_duration(target.value)}"
    return f"exposed communication of at most {percent(target.value, 1)} of the step"


def print_threshold(found: Threshold, problem: Problem, budget: Budget) -> None:
    """Print the least value that meets the target, its configuration and cost, or the obstacle."""
    out = screen()
    out.print()
    for number, sentence in enumerate(threshold_words(found, problem)):
        out.print(sentence, style="bold" if number == 0 else None)
    if found.answer is not None and found.answer.candidate is not None:
        speed = found.answer.candidate.tokens_per_s
        cost = cost_words(budget, speed, found.answer.problem.cluster)
        if cost:
            out.print(cost)


def threshold_words(found: Threshold, problem: Problem) -> list[str]:
    """Sentences: the least value or why there is none, then figures of its configuration."""
    name, cluster = _NOUNS.get(found.name, found.name), problem.cluster
    wanted = target_words(found.target)
    if found.answer is not None:
        return [f"Least {name} for {wanted}: {found.answer.value}", *_point_lines(found.answer)]
    if found.obstacle == "no network":
        here = found.tried[0]
        result = "is reached" if found.met else "is not reached"
        limit = f" The limit is {limit_words(here)}." if here.candidate else ""
        links = (
            f"A single node has no network: its {cluster.devices} devices communicate over "
            f"{cluster.device.link}."
            if cluster.devices > 1
            else "A single device needs no network."
        )
        return [f"{links} {capital(wanted)} {result}.{limit}", *_point_lines(here)]
    if found.obstacle == "network needed":
        best = found.best
        return [
            f"No number of devices on one node reaches {wanted}.",
            *(_point_lines(best, "Best") if best else ["No configuration fits on one node."]),
            f"{capital(needs_network(cluster))}.",
        ]
    reach = f" up to {MOST_DEVICES:,}" if found.name == "devices" else ""
    if not reach and found.tried:
        reach = f" up to {found.tried[-1].value}"
    best = found.best
    return [
        f"No {name}{reach} reaches {wanted}.",
        *(_point_lines(best, "Best") if best else ["No configuration fits at any value."]),
    ]


def _point_lines(point: Point, label: str = "") -> list[str]:
    """Two lines about a point: its configuration; step time, MFU, exposed communication, memory.

    One line if no configuration fits. With a `label`, the first of two lines starts with it and the
    value of the point.
    """
    c = point.candidate
    if c is None:
        return ["No configuration fits there."]
    job = point.problem.job
    words = configuration_words(
        c.strategy, seq_len=job.seq_len, blocks=blocks_of(point.problem.model)
    )
    head = f"{label}, at {point.value}: " if label else ""
    return [
        f"{head}{words}",
        f"{show_seconds(c.step_s)} per step, MFU {percent(point.mfu or 0.0, 1)}, exposed "
        f"communication {percent(c.exposed_s / c.step_s, 1)} of the step, "
        f"{c.needed_bytes / GIB:,.1f} GiB per device.",
    ]
