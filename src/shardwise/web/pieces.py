"""HTML pieces of a page about a plan or an estimate, by name."""

from __future__ import annotations

from typing import Any

from shardwise.planning.money import Budget
from shardwise.planning.plan import Plan
from shardwise.planning.rows import Candidate
from shardwise.planning.threshold import Threshold
from shardwise.report.money import cost_words, deadline_words
from shardwise.report.page.headline import description_line, figure_tiles, verdict
from shardwise.report.page.markup import Content, Markup, element, fragment
from shardwise.report.page.memory import memory_section
from shardwise.report.page.plans import front_section, layouts_table, reasons_list, shown_layouts
from shardwise.report.page.subject import Subject
from shardwise.report.page.time import time_section
from shardwise.report.page.timeline import timeline_section
from shardwise.spec.strategy_words import layout_words, shorthand
from shardwise.web.options import with_buttons

# Pieces with sentences that name options.
_SENTENCES = ("verdict", "why")


def plan_pieces(subject: Subject, more: Threshold | None) -> dict[str, str]:
    """HTML pieces for a plan by name: verdict, reasons, layouts, cost, and its step.

    `more` is the search for the devices that meet a missed deadline.
    """
    plan = subject.plan
    assert plan is not None
    told: dict[str, Content] = {"cost": _cost(plan, more)}
    if plan.winner is not None:
        told |= {
            # The page can show another layout too, so the heading names this one.
            "why": [element("h2", _recommended(plan.winner)), reasons_list(plan)],
            "layouts": layouts_table(plan, _layout_button),
            "front": front_section(plan),
        }
    pieces = _written({**_step(subject), **told})
    return pieces | {name: with_buttons(pieces[name]) for name in _SENTENCES if name in pieces}


def estimate_pieces(subject: Subject, budget: Budget) -> dict[str, str]:
    """HTML pieces for one configuration by name: verdict, cost, memory, time, timeline."""
    cost, profile = "", subject.profile
    if subject.run is not None and profile is not None and profile.throughput is not None:
        cost = cost_words(budget, profile.throughput.tokens_per_s, subject.run.cluster)
    return _written({**_step(subject), "cost": element("p", cost) if cost else None})


def planned_layouts(plan: Plan) -> list[dict[str, Any]]:
    """Name and settings of the configuration behind each button in the table of layouts."""
    return [
        {
            "name": shorthand(one.strategy),
            "strategy": one.strategy.model_dump(mode="json"),
        }
        for one in shown_layouts(plan)
    ]


def _step(subject: Subject) -> dict[str, Content]:
    """Pieces of every page: verdict, tiles, memory, time and timeline; None if unknown."""
    known = subject.profile is not None
    return {
        "about": description_line(subject) if known else None,
        "verdict": verdict([subject]),
        "tiles": figure_tiles(subject) if known else None,
        "memory": memory_section([subject]),
        "time": time_section([subject]),
        "timeline": timeline_section([subject]),
    }


def _recommended(winner: Candidate) -> str:
    """The heading above the reasons."""
    return f"Why {layout_words(winner.strategy)} is recommended"


def _cost(plan: Plan, more: Threshold | None) -> Markup | None:
    """The cost of the tokens and advice on a missed deadline; None without either."""
    told = []
    if plan.winner is not None:
        told.append(cost_words(plan.budget, plan.winner.tokens_per_s, plan.problem.cluster))
    if more is not None:
        told.append(deadline_words(more, plan.problem, plan.budget))
    return fragment([element("p", sentence) for sentence in told if sentence]) or None


def _layout_button(number: int, name: str) -> Markup:
    """A button that shows a layout; `number` is its index in `planned_layouts`."""
    return element("button", name, type="button", class_="layout", data_layout=str(number))


def _written(pieces: dict[str, Content]) -> dict[str, str]:
    """The pieces as HTML text; empty ones are left out."""
    return {name: str(fragment(piece)) for name, piece in pieces.items() if piece}
