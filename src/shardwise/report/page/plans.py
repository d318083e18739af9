"""A plan on a page: reasons, layouts compared, memory against throughput, and what-ifs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.planning.plan import Plan
from shardwise.planning.problem import Problem
from shardwise.planning.reasons.settings import StepBatch
from shardwise.planning.rows import Candidate
from shardwise.planning.whatif import Point, study
from shardwise.report.page.bars import badge
from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.markup import Content, Markup, element, fragment, table
from shardwise.report.page.subject import Subject
from shardwise.report.plan_words import ranked_layouts, rule_words, too_close_words
from shardwise.spec.quantity import GIB, show_count, show_seconds, show_whole
from shardwise.spec.record import SpecError
from shardwise.spec.strategy_words import (
    batch_words,
    blocks_of,
    configuration_words,
    recompute_cell,
    shorthand,
)

_LAYOUTS = 12


# A function that draws the name of a layout, given its row number and name.
Named = Callable[[int, str], Content]


def plan_section(plan: Plan) -> Markup | None:
    """The reasons and the layouts compared; None if no configuration fits."""
    if plan.winner is None:
        return None
    return fragment(reasons_list(plan), layouts_table(plan))


def reasons_list(plan: Plan) -> Markup:
    """HTML list: why the winner is the best, and what else to try."""
    # The verdict already states tokens per step and warnings.
    why = [one for one in (*plan.why, *plan.limits_why) if not isinstance(one, StepBatch)]
    sentences = [one.words(plan.units.blocks) for one in (*why, *plan.tips)]
    return element("ul", [element("li", sentence) for sentence in sentences], class_="reasons")


def shown_layouts(plan: Plan) -> list[Candidate]:
    """The configurations in the table of layouts, in its order."""
    return ranked_layouts(plan, _LAYOUTS)


def layouts_table(plan: Plan, named: Named = lambda _, name: name) -> Markup:
    """Table of the best of each layout, and how many configurations were priced.

    `named` draws the name of a layout.
    """
    rows = [_row(plan, one, number, named) for number, one in enumerate(shown_layouts(plan))]
    rows += [
        [_baseline_name(b.name, shorthand(b.strategy)), batch_words(b.strategy),
         recompute_cell(b.strategy, plan.units.blocks), b.verdict, "", "",
         f"{b.needed_bytes / GIB:,.1f} GiB"]
        for b in plan.baselines if b.candidate is None
    ]  # fmt: skip
    notes = [
        too_close_words(plan),
        rule_words(plan) if len(plan.layouts) > 1 and plan.objective != "memory" else "",
        f"{plan.considered:,} configurations priced, {plan.fitting:,} fit.",
    ]
    head: list[Content] = [
        fragment("layout ", badge("predicted")),
        *("batch", "recompute", "step", "tokens/s", "MFU", "memory"),
    ]
    return fragment(
        table(head, rows, "Layouts compared"),
        element(
            "p",
            " ".join(note for note in notes if note),
            class_="fine",
        ),
    )


def _baseline_name(name: str, layout: str) -> str:
    """The layout of a baseline; with its name in front, if that differs."""
    return layout if name == layout else f"{name}: {layout}"


def _row(plan: Plan, one: Candidate, number: int, named: Named) -> list[Content]:
    """Cells of one configuration; the winner is marked as recommended."""
    name = named(number, shorthand(one.strategy))
    if one is plan.winner:
        name = element("b", name, " (recommended)")
    return [
        name,
        batch_words(one.strategy),
        recompute_cell(one.strategy, plan.units.blocks),
        show_seconds(one.step_s),
        show_count(one.tokens_per_s),
        f"{plan.mfu(one):.1%}",
        f"{one.needed_bytes / GIB:,.1f} GiB",
    ]


def front_section(plan: Plan) -> Markup | None:
    """Chart of tokens/s against memory per device; None if no configuration fits."""
    if plan.winner is None:
        return None
    front = sorted([*plan.front, plan.winner], key=lambda c: c.needed_bytes)
    others = [c for c in plan.layouts if c not in front]
    x = Axis("memory per device", lambda gib: f"{gib:,.0f} GiB", from_zero=True)
    y = Axis("tokens/s", show_count, from_zero=True)
    series = [
        _point_series("fastest at this memory", front, 0, True),
        _point_series("best of another layout", others, 1, False),
        _point_series("recommended", [plan.winner], 2, False)._replace(strong=True),
    ]
    alt = (
        f"Tokens per second against memory per device: the recommended configuration reaches "
        f"{show_count(plan.winner.tokens_per_s)} with {plan.winner.needed_bytes / GIB:,.1f} GiB."
    )
    return chart(x, y, series, alt)


def _point_series(name: str, found: Sequence[Candidate], colour: int, line: bool) -> Series:
    """Configurations as a series of (GiB per device, tokens/s)."""
    return Series(
        name,
        [(c.needed_bytes / GIB, c.tokens_per_s) for c in found],
        colour=colour,
        line=line,
        titles=[f"{configuration_words(c.strategy)}: "
                f"{show_count(c.tokens_per_s)} tokens/s" for c in found],
    )  # fmt: skip


# ---- what if --------------------------------------------------------------------------------


def whatif_section(one: Subject) -> Markup | None:
    """Charts over network bandwidth and number of devices, planned again at each point.

    None if no configuration fits, or neither chart can be drawn.
    """
    if one.plan is None or one.plan.winner is None:
        return None
    problem = one.plan.problem
    drawn = [_network(problem), _devices(problem)]
    drawn = [figure for figure in drawn if figure is not None]
    if not drawn:
        return None
    return fragment(
        element("p", "The best configuration at each point, searched for anew."),
        element("div", drawn, class_="pair"),
    )


def _network(problem: Problem) -> Markup | None:
    """Chart of MFU over network bandwidth, in Gbps per device; None on one node."""
    network = problem.cluster.network
    if problem.cluster.nodes == 1 or network is None:
        return None
    here = network * 8 / 1e9
    points = _study(problem, "network", [f"{here * f:g}Gbps" for f in (0.25, 0.5, 1, 2, 4)])
    told = [(p, (p.problem.cluster.network or 0.0) * 8 / 1e9) for p in points]
    x = Axis(
        "network per device",
        lambda v: f"{v:g} Gbps",
        True,
        [here * f for f in (0.25, 0.5, 1, 2, 4)],
    )
    y = Axis("MFU by network", lambda v: f"{v:.0%}", from_zero=True)
    return chart(
        x, y, [_line(told, "MFU", lambda p: p.mfu or 0.0)], "MFU as the network gets faster."
    )


def _devices(problem: Problem) -> Markup | None:
    """Chart of tokens/s per device over the number of devices; None with fewer than two points."""
    count = problem.cluster.devices
    sizes = [size for size in (count // 8, count // 4, count // 2, count, 2 * count, 4 * count)
             if size >= 1]  # fmt: skip
    points = _study(problem, "devices", [str(size) for size in sizes])
    told = [(p, float(p.problem.cluster.devices)) for p in points]
    if len(told) < 2:
        return None

    def each(point: Point) -> float:
        assert point.candidate is not None
        return point.candidate.tokens_per_s / point.problem.cluster.devices

    x = Axis("devices", show_whole, True, [at for _, at in told])
    y = Axis("tokens/s per device, by devices", show_count, from_zero=True)
    return chart(
        x, y, [_line(told, "tokens/s per device", each)],
        "Tokens per second and device as devices are added.",
    )  # fmt: skip


def _study(problem: Problem, name: str, values: list[str]) -> list[Point]:
    """Points of a what-if at which a configuration fits; empty if values are not possible."""
    try:
        return [point for point in study(problem, name, values) if point.candidate is not None]
    except SpecError:
        return []  # one node cannot grow without a network between nodes


def _line(told: list[tuple[Point, float]], name: str, value: Callable[[Point], float]) -> Series:
    """A series of `value` at each point; `told` pairs points with their x values."""
    return Series(
        name,
        [(at, value(point)) for point, at in told],
        titles=point_titles([point for point, _ in told]),
    )


def point_titles(points: Sequence[Point]) -> list[str]:
    """Tooltips: the configuration and MFU of each point that has one."""
    return [
        f"{configuration_words(p.candidate.strategy, blocks=blocks_of(p.problem.model))}: "
        f"MFU {p.mfu or 0:.1%}"
        for p in points
        if p.candidate is not None
    ]
