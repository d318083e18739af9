"""The table of ranks of a trace: the evidence for stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.page.bars import badge
from shardwise.report.page.markup import Markup, element, fragment, table
from shardwise.report.page.subject import Subject
from shardwise.report.trace import period_of
from shardwise.report.trace_ranks import EXPOSED, ranks_table, ranks_to_show

_MOST = 64


def ranks_section(subjects: Sequence[Subject]) -> Markup | None:
    """Tables of where the time of each rank goes, and how often it arrives last.

    None without traces.
    """
    drawn = []
    for one in subjects:
        if one.traced is None:
            continue
        summary, steps = one.traced.summary, one.traced.health.steps
        shown = ranks_table(summary, ranks_to_show(summary, one.traced.verdicts, _MOST))
        head = [column.title for column in shown.columns]
        rows = [shown.texts(row) for row in shown.rows]
        drawn += [
            element("h3", one.name) if len(subjects) > 1 else None,
            element("p", f"Milliseconds and share of time, {period_of(steps)} ", badge("measured")),
            table(head, rows, f"Ranks of {one.name}"),
        ]
    return fragment(element("p", EXPOSED), drawn) if drawn else None
