"""How records display in notebooks: the one door from a record up to the report that draws it."""

from __future__ import annotations


def html_of(record: object) -> str:
    """HTML of a Plan or a StepProfile; `report` is loaded when a notebook asks for it."""
    from shardwise.report.page.cell import record_cell

    return record_cell(record)
