"""Costs in words and as a table: time, device-hours, money, and the size to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.planning.money import (
    BILLION,
    DAY,
    HOUR,
    Budget,
    Cost,
    SizeChoice,
    SizedCandidate,
)
from shardwise.planning.problem import Problem
from shardwise.planning.threshold import MOST_DEVICES, Threshold
from shardwise.planning.vary import needs_network
from shardwise.report.table import Cell, Column, Table
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import show_count
from shardwise.spec.strategy_words import shorthand
from shardwise.step.words import capital, percent, ratio_text


class Figure(NamedTuple):
    """A number as text, and its unit: "hours" or "days"; empty for money."""

    number: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.unit}" if self.unit else self.number


def _duration(seconds: float) -> Figure:
    """Seconds as hours, or as days from one day on."""
    days = seconds / DAY
    return (
        Figure(f"{days:,.1f}", "days") if days >= 1 else Figure(f"{seconds / HOUR:,.1f}", "hours")
    )


def _amount(amount: float) -> Figure:
    """An amount as text: cents below 100."""
    return Figure(f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}")


def show_duration(seconds: float) -> str:
    """Seconds as text in hours, or in days from one day on."""
    return str(_duration(seconds))


def show_money(amount: float) -> str:
    """An amount in the currency of `--price`; cents below 100."""
    return str(_amount(amount))


def cost_words(budget: Budget, tokens_per_s: float, cluster: ClusterSpec) -> str:
    """Sentence: time, device-hours and money for the budget's tokens, and whether in time.

    Empty if the budget has neither tokens nor a price.
    """
    if not budget.given:
        return ""
    cost = budget.cost(tokens_per_s, cluster)
    parts = [
        _with_interval(cost, cost.seconds, _duration) if cost.seconds is not None else "",
        f"{cost.device_hours:,.0f} device-hours" if cost.money is None else "",
        f"money {_with_interval(cost, cost.money, _amount)}" if cost.money is not None else "",
    ]
    sentence = f"For {tokens_words(budget)}: {', '.join(part for part in parts if part)}."
    if budget.listed is not None:
        sentence += f" {list_price_words(budget)}"
    if budget.deadline_s is None or cost.seconds is None:
        return sentence
    deadline, upper = show_duration(budget.deadline_s), budget.upper_s(tokens_per_s, cluster) or 0.0
    if not budget.in_time(tokens_per_s):
        sentence += f" Misses the deadline of {deadline}."
    elif upper > budget.deadline_s:
        sentence += (
            f" Deadline of {deadline}: met by the estimate ({show_duration(cost.seconds)}), not by "
            f"the upper end of the 90% interval ({show_duration(upper)})."
        )
    return sentence


def list_price_words(budget: Budget) -> str:
    """Sentence on the price that is used where none was given; empty otherwise."""
    if budget.listed is None:
        return ""
    instance, price, day = budget.listed
    return (
        f"Price: {price:.2f} USD per GPU-hour, on-demand price of {instance} of {day}; --price "
        "sets another."
    )


def _with_interval(cost: Cost, value: float, figure_of: Callable[[float], Figure]) -> str:
    """A figure with its 90 % interval; the upper end allows for failures."""
    figure, ends = figure_of(value), [figure_of(value * (1 + end)) for end in cost.interval]
    one_unit = {end.unit for end in ends} == {figure.unit}
    low, high = (end.number if one_unit else str(end) for end in ends)
    return f"{figure} ({low} to {high})"


def tokens_words(budget: Budget) -> str:
    """The number of tokens that costs refer to: the budget's, or a billion."""
    return f"{show_count(budget.tokens or BILLION)} tokens"


def cost_columns(budget: Budget) -> tuple[Column, ...]:
    """Columns for the costs that the budget determines; CSV headers are the keys of `--json`."""
    per = "" if budget.tokens is not None else "_per_billion_tokens"
    columns = {
        "seconds": Column("seconds", "time", show_duration),
        "hours": Column(f"device_hours{per}", "device-hours", lambda hours: f"{hours:,.0f}"),
        "money": Column(f"money{per}", "money", show_money),
        "in_time": Column("in_time", "in time", lambda met: "yes" if met else "late"),
    }
    return tuple(columns[name] for name in _known_costs(budget))


def _known_costs(budget: Budget) -> list[str]:
    """Keys of the costs that the budget determines: seconds, hours, money, in_time."""
    known = {
        "seconds": budget.tokens is not None,
        "hours": True,
        "money": budget.price is not None,
        "in_time": budget.deadline_s is not None,
    }
    return [name for name, given in known.items() if given]


def added_cost_columns(budget: Budget) -> tuple[Column, ...]:
    """Cost columns for CSV and Markdown only; empty without a budget."""
    columns = cost_columns(budget) if budget.given else ()
    return tuple(column._replace(on_screen=False) for column in columns)


def added_cost_cells(budget: Budget, tokens_per_s: float, cluster: ClusterSpec) -> list[Cell]:
    """Cells of `added_cost_columns` at a throughput; empty without a budget."""
    return cost_cells(budget, tokens_per_s, cluster) if budget.given else []


def cost_cells(budget: Budget, tokens_per_s: float, cluster: ClusterSpec) -> list[Cell]:
    """Cells of `cost_columns` at a throughput: seconds, device-hours, money, in time."""
    cost, met = budget.cost(tokens_per_s, cluster), budget.in_time(tokens_per_s)
    cells = {
        "seconds": Cell(cost.seconds),
        "hours": Cell(cost.device_hours),
        "money": Cell(cost.money),
        "in_time": Cell(met, style="" if met else "red"),
    }
    return [cells[name] for name in _known_costs(budget)]


def sizes_table(sizes: list[SizedCandidate], budget: Budget, chosen_devices: int) -> Table:
    """One row per number of devices: layout, throughput and cost; the chosen row is bold."""
    table = Table(
        (
            Column("devices", "devices", lambda count: f"{count:,}"),
            Column("layout", "layout", left=True),
            Column("tokens_per_s", "tokens/s", show_count),
            *cost_columns(budget),
        )
    )
    for size in sizes:
        speed = size.candidate.tokens_per_s
        table.add(
            *(size.cluster.devices, shorthand(size.candidate.strategy), speed),
            *cost_cells(budget, speed, size.cluster),
            strong=size.cluster.devices == chosen_devices,
        )
    return table


def size_words(choice: SizeChoice) -> str:
    """Sentences: the chosen number of devices, why, and its cost against the cheapest.

    Empty if no configuration fits.
    """
    all_devices = choice.all_devices
    if choice.reason == "no configuration fits":
        return ""
    if choice.chosen is None or choice.cheapest_in_time is None or choice.cheapest is None:
        return (
            f"No size up to {all_devices:,} devices meets the deadline; figures are for all "
            f"{all_devices:,}."
        )
    sentences = [_chosen_words(choice, choice.chosen, choice.cheapest_in_time)]
    if choice.deadline_costs:
        late = choice.cheapest
        saving = _saving(late, choice.chosen)
        sentences.append(
            f"{_devices(late, all_devices)} would cost {saving} less per token but miss the "
            "deadline."
        )
    return " ".join(sentences)


def _chosen_words(choice: SizeChoice, chosen: SizedCandidate, least: SizedCandidate) -> str:
    """Sentence on the chosen size, against `least`, the cheapest that meets the deadline."""
    all_devices = choice.all_devices
    name = _devices(chosen, all_devices)
    if choice.reason == "cheapest":
        of_those = " of the sizes that meet the deadline" if choice.deadline_costs else ""
        return f"{name} cost least per token{of_those}."
    saving = _saving(least, chosen)
    slower = ratio_text(chosen.candidate.tokens_per_s / least.candidate.tokens_per_s)
    return (
        f"{name}: {_devices(least, all_devices)} would cost {saving} less and take {slower} as "
        "long."
    )


def _saving(cheap: SizedCandidate, chosen: SizedCandidate) -> str:
    """Share of the cost per token that `cheap` saves against `chosen`, as a percentage.

    Never `0.0%`, which the table would contradict.
    """
    share = 1 - cheap.cost / chosen.cost
    return percent(share, 1) if share >= 0.001 else "under 0.1%"


def _devices(size: SizedCandidate, all_devices: int) -> str:
    """The size as text: "All 512 devices" or "64 of 512 devices"."""
    count = size.cluster.devices
    if count == all_devices:
        return f"All {count:,} devices"
    return f"{count:,} of {all_devices:,} devices"


def deadline_words(found: Threshold, problem: Problem, budget: Budget) -> str:
    """Sentence: the fewest devices that meet a missed deadline, or that none do."""
    if found.answer is not None and found.answer.candidate is not None:
        candidate, cluster = found.answer.candidate, found.answer.problem.cluster
        took = show_duration(found.target.tokens / candidate.tokens_per_s)
        upper = budget.upper_s(candidate.tokens_per_s, cluster) or 0.0
        if upper > (budget.deadline_s or upper):
            took += f"; upper end of the 90% interval: {show_duration(upper)}"
        return f"To meet the deadline: {cluster.devices:,} devices ({took}): --cluster {cluster}"
    if found.obstacle == "network needed":
        return (
            "No number of devices on one node meets the deadline. "
            f"{capital(needs_network(problem.cluster))}."
        )
    return f"No cluster size up to {MOST_DEVICES:,} devices meets the deadline."
