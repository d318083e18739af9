"""A plan as JSON: what `shardwise plan --json` prints and a page answers."""

from __future__ import annotations

from typing import Any

from shardwise.planning.least import Least, devices_for_deadline
from shardwise.planning.plan import Plan


def devices_in_time(plan: Plan) -> Least | None:
    """How many devices meet the deadline that a plan misses; None where it misses none."""
    return devices_for_deadline(plan.problem, plan.budget) if plan.late else None


def plan_record(plan: Plan, for_stack: str | None, more: Least | None) -> dict[str, Any]:
    """The plan, the stack it was made for, and the devices with which it meets its deadline."""
    advice = {"deadline": more.to_dict(plan.budget)} if more else {}
    return {**plan.to_dict(), "for_stack": for_stack, **advice}
