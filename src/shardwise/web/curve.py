"""Curves of a page: the throughput of the best configuration as one quantity varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.planning.problem import Problem
from shardwise.planning.whatif import Point, study
from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.plans import point_titles
from shardwise.spec.quantity import GIB, show_count, show_whole
from shardwise.spec.record import SpecError, did_you_mean

# By quantity: its value at a point, the title of its axis, and how values are shown.
_GBPS = 8 / 1e9
_AXES: dict[str, tuple[Callable[[Point], float], str, Callable[[float], str]]] = {
    "network": (
        lambda p: (p.problem.cluster.network or 0.0) * _GBPS,
        "network per device",
        lambda v: f"{v:g} Gbps",
    ),
    "memory": (
        lambda p: p.problem.cluster.device.memory / GIB,
        "memory of a device",
        lambda v: f"{v:g} GiB",
    ),
    "devices": (lambda p: float(p.problem.cluster.devices), "devices", show_whole),
    "seq-len": (lambda p: float(p.problem.job.seq_len), "sequence length", show_whole),
}


def draw_curve(problem: Problem, quantity: str, values: Sequence[str]) -> dict[str, Any]:
    """Points and a chart of tokens/s per device over `values`, planned again at each value.

    `exit_code` is 1 if no configuration fits at any value. SpecError for an unknown quantity.
    """
    if quantity not in _AXES:
        hint = did_you_mean(quantity, _AXES) or f"; known are {', '.join(_AXES)}"
        raise SpecError(f"vary: unknown quantity {quantity[:40]!r}{hint}")
    if not values:
        raise SpecError("values: give at least one")
    value_of, title, show = _AXES[quantity]
    points = study(problem, quantity, values)
    told = sorted(((value_of(p), p) for p in points if p.candidate is not None), key=lambda t: t[0])
    x = Axis(title, show, True, [at for at, _ in told])
    y = Axis(f"tokens/s per device, by {title}", show_count, from_zero=True)
    series = Series(
        "tokens/s per device",
        [(at, _each(point)) for at, point in told],
        titles=point_titles([point for _, point in told]),
    )
    alt = f"Tokens per second and device against {title}, the best configuration at each point."
    html = str(chart(x, y, [series], alt)) if len(told) > 1 else ""
    return {
        "exit_code": 0 if told else 1,
        "points": [point.to_dict() for point in points],
        "html": {"curve": html},
    }


def _each(point: Point) -> float:
    """Tokens/s per device of the configuration at a point."""
    assert point.candidate is not None
    return point.candidate.tokens_per_s / point.problem.cluster.devices
