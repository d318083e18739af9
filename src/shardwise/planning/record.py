"""A plan as JSON, as `shardwise plan --json` prints it and the web page returns it."""

from __future__ import annotations

from typing import Any

from shardwise.planning.plan import Plan
from shardwise.planning.threshold import Threshold, devices_for_deadline


def devices_in_time(plan: Plan) -> Threshold | None:
    """The least number of devices that meets the deadline; None if the plan does not miss one."""
    return devices_for_deadline(plan.problem, plan.budget) if plan.late else None


def plan_record(plan: Plan, for_stack: str | None, more: Threshold | None) -> dict[str, Any]:
    """The plan as JSON, with its stack, and the devices needed to meet the deadline (`more`)."""
    advice = {"deadline": more.to_dict(plan.budget)} if more else {}
    return {**plan.to_dict(), "for_stack": for_stack, **advice}
